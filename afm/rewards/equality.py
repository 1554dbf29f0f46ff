r"""Whether two mathematical answers are equal: cheap certainty first, Math-Verify for the rest.

Answers are text from a model and never evaluated as Python: Math-Verify is used with its LaTeX grammar
alone, not with its plain expressions, which go through sympy's ``parse_expr``.
"""

from __future__ import annotations

import re
from fractions import Fraction

from afm.rewards.worked_out import Form, form_of

MAX_ANSWER_CHARS = 4000
"""Longer answers are wrong unless they are the gold answer letter for letter."""

_NUMBER = re.compile(r"[+-]?(?:\d{1,300}(?:\.\d{0,300})?|\.\d{1,300})")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|mathbf)\s*\{([^{}\\]*)\}")
_WORD = re.compile(r"[A-Za-z][A-Za-z '-]+")
_TERM = r"(?:[a-z]|[b-df-hj-np-tv-z]{2,3}|a[b-dx-z]{1,2})"
_SYMBOLS = re.compile(rf"{_TERM}(?:[ -]+{_TERM})*")
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_IN_BASE = re.compile(r"(-?[0-9A-Za-z.]+)_\{?(\d+)\}?")
_SIZES = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[!,;:]|~")


def quick_verdict(gold: str, answer: str) -> bool | None:
    """Equal, different, or ``None`` when only algebra can tell.

    Decides equal texts, plain numbers, words (Math-Verify takes a word for the product of its letters, so
    it accepts anagrams) and numbers that name their base (whose base it ignores).
    """
    if gold.strip() == answer.strip():
        return True
    left, right = tidied(gold), tidied(answer)
    if left == right:
        return True
    if len(answer) > MAX_ANSWER_CHARS or not right:
        return False
    words = _as_words(gold)
    if words is not None:
        return words == _as_words(answer)
    if in_base := _IN_BASE.fullmatch(left):
        return _same_in_base(in_base[1], in_base[2], right)
    first, second = _as_number(left), _as_number(right)
    if first is None or second is None:
        return None
    if first == second:
        return True
    # Math-Verify rounds: leave close numbers to it.
    return False if abs(first - second) * 1000 > abs(first) else None


def is_unevaluated(gold: str, answer: str) -> bool:
    r"""Whether the gold answer is one number and the answer an expression that was never worked out.

    See :mod:`afm.rewards.worked_out`. ``144/2`` is not worked out for 72; ``10/12`` is for 5/6.
    """
    expected, given = form_of(tidied(gold)), form_of(tidied(answer))
    if expected is None:
        return False
    return given is None or (given is Form.UNREDUCED and expected is Form.NUMBER)


def tidied(text: str) -> str:
    r"""Without spacing commands, ``$`` around it, one ``\boxed`` too many and a closing full stop."""
    text = _SIZES.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = " ".join(text.split()).strip("$ ").removesuffix(".").strip()
    boxed = _BOXED.fullmatch(text)
    return boxed[1].strip() if boxed else text


def _as_words(text: str) -> str | None:
    r"""The words of an answer that is nothing but words, or a ``\text{}`` alone; else ``None``.

    ``xy``, ``ab - c`` and their like are products and differences of letters, no words.
    """
    tidy = tidied(text)
    inner = _TEXT.fullmatch(tidy)
    if inner is None:
        in_words = _WORD.fullmatch(tidy) or re.fullmatch(r"\(?[A-Z]\)?", tidy)
        if not in_words or _SYMBOLS.fullmatch(tidy):
            return None
    plain = " ".join((inner[1] if inner else tidy).split()).strip("() .").casefold()
    return plain or None


def _same_in_base(digits: str, base: str, answer: str) -> bool:
    other = _IN_BASE.fullmatch(answer)
    if other is not None:
        return (other[1].lstrip("0"), other[2]) == (digits.lstrip("0"), base)
    return answer.lstrip("0") == digits.lstrip("0")


def _as_number(text: str) -> Fraction | None:
    return Fraction(text) if _NUMBER.fullmatch(text) and text.strip("+-.") else None


def algebra_verdict(gold: str, answer: str) -> bool:
    """Math-Verify's verdict. Slow, and for hostile input unbounded: run it in :mod:`afm.rewards.verifier`."""
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    expected, given = (
        parse(f"\\boxed{{{text}}}", extraction_config=config, parsing_timeout=None) for text in (gold, answer)
    )
    return bool(verify(expected, given, timeout_seconds=None))
