r"""Compare mathematical answers as far as no algebra is needed (:mod:`afm.rewards.verifier` does the rest).

The module also finds answers that are copied from the question: ``\sqrt{242}`` equals ``11\sqrt{2}``, but a model that
must simplify it and repeats it has done nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction

from afm.rewards.answer_form import Form, form_of, has_variables, is_equation, without_unit

MAX_ANSWER_CHARS = 4000
"""Longer answers are wrong unless they are identical to the gold answer."""

REPEATING = re.compile(
    r"(?<![\w.])(\d{0,30})\.(\d{0,30})\\(?:overline|bar|dot)\s*(?:\{\s*(\d{1,30})\s*\}|(\d))"
)
"""A repeating decimal: whole part, digits that occur once, digits that repeat (in braces or single)."""

_NUMBER = re.compile(r"[+-]?(?:\d{1,300}(?:\.\d{0,300})?|\.\d{1,300})")
_GROUPED = re.compile(
    r"(?<![\w.,^])\d{1,3}(?:(?:,\s*\\!\s*|\s?\{\s?,\s?\}\s*(?:\\!\s*)?|\\ |[ \u00a0\u2009\u202f])\d{3})+(?!\d)"
)
_CURRENCY = r"(?:\\?\$|\\pounds|\\euro|[£€¥])"
_AMOUNT = re.compile(
    rf"([+-]?)\s*{_CURRENCY}?\s*([1-9]\d{{0,2}}(?:,\d{{3}})+|\d{{1,300}})(\.\d{{0,300}})?\s*{_CURRENCY}?"
)
_WRAPPER = r"\\(?:text|textbf|textit|textnormal|mbox|mathrm|mathbf)\s*"
_TEXT = re.compile(rf"{_WRAPPER}\{{([^{{}}\\]*)\}}")
_NUMBER_AS_TEXT = re.compile(rf"(?<![\w.]){_WRAPPER}\{{\s*([+-]?\d[\d.,]*)\s*\}}")
_WORD = re.compile(r"[A-Za-z][A-Za-z '-]+")
_TERM = r"(?:[a-z]|[b-df-hj-np-tv-z]{2,3}|a[b-dx-z]{1,2})"
_SYMBOLS = re.compile(rf"{_TERM}(?:[ -]+{_TERM})*")
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_IN_BASE = re.compile(r"(-?[0-9A-Za-z.]+)_\{?(\d+)\}?")
_BASE_IN_WORDS = re.compile(
    r"_\s*\{?\s*\\text\s*\{\s*([a-z]+)\s*\}\s*\}?|\s*(?:\\text\s*\{)?\s*\(?base\s*\}?\s*(\d+)\)?\}?"
)
_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_SIZES = re.compile(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[!,;:]|~")
_SPELLINGS = [  # different spellings of the same thing
    (re.compile(pattern), plain)
    for pattern, plain in (
        ("[\u2212\u2013]", "-"),
        ("²", "^2"),
        ("³", "^3"),
        (r"√\s*(\d+|[A-Za-z]|\{[^{}]*\}|\([^()]*\))", r"\\sqrt{\1}"),
        (r"°|\\degree(?![A-Za-z])", r"^{\\circ}"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\langle(?![A-Za-z])\s*", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\[cdt]frac(?![A-Za-z])", r"\\frac"),
        (r"(?<=\d)\\ (?=\\frac)", ""),
        (r"^([+-]?\d{1,30})(?:\s|\\ )(\d{1,30})/(\d{1,30})$", r"\1\\frac{\2}{\3}"),
        (r"^([+-]?\d{1,30}(?:\.\d{0,30})?)[eE]([+-]?\d{1,3})$", r"\1 \\times 10^{\2}"),
        (r"^\(([^()]*)\)\s*\^\s*\{?\s*\\circ\s*\}?$", r"\1^{\\circ}"),
    )
]
_SIGN_OF_PERCENT = r"(?:\\?%|\uff05|per ?cent(?:age)?(?: points?)?|pct)"
_PERCENT = re.compile(_SIGN_OF_PERCENT, re.IGNORECASE)
_PERCENT_AT_END = re.compile(
    rf"(?:\\ | ){{0,9}}(?:{_WRAPPER}\{{\s*{_SIGN_OF_PERCENT}\s*\}}|{_SIGN_OF_PERCENT})$", re.IGNORECASE
)
_AMOUNT_BEFORE = re.compile(r"(\d[\d.,]*)[\s$}\\]*$")
_SEPARATOR = re.compile(r"(?:[,;]|\\text\s*\{\s*(?:, *)?and\s*\}|\band\b)(?:\s|\\ |\\q?quad(?![A-Za-z]))*")
_ORDER = re.compile(r"[<>≤≥]|\\(?:[lg]t|[lg]eq?(?:slant)?)(?![A-Za-z])")
_OR = re.compile(r"\\(?:text|mbox)\s*\{\s*or\s*\}|\bor\b|\\l?or(?![A-Za-z])|\\cup(?![A-Za-z])")
_BOUND = re.compile(rf"([a-z])\s*({_ORDER.pattern})([^<>≤≥=]+)")
_COLUMN = re.compile(r"\\begin\{([pb]matrix)\}([^&]*)\\end\{\1\}")
_ASSIGNMENT = re.compile(r"\\?([A-Za-z]+(?:_\{?\w+\}?)?)\s*=([^=<>]+)")


def readings(gold: str, answer: str, question: str = "") -> list[tuple[str, str]]:
    r"""Return the pairs to compare for ``gold`` and ``answer``, which are equal if one pair is.

    If only one of the two has a percent sign, the gold answer and the question decide its meaning. ``x=4, y=5`` is the
    pair ``(4, 5)`` if the other answer names no unknowns.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return [(gold, answer)]
    gold_number, answer_number = (_PERCENT_AT_END.sub("", tidied(text)) for text in (gold, answer))
    in_gold, in_answer = gold_number != tidied(gold), answer_number != tidied(answer)
    if in_gold and in_answer:
        return [(gold_number, answer_number)]
    if in_gold or in_answer:
        return _percent_readings(gold_number, answer_number, question, in_gold)
    gold, answer = _without_column(*_without_names(gold, answer))
    if "\\infty" in gold or "\\infty" in answer:
        gold, answer = _union(gold), _union(answer)
    return [(gold, answer)]


def _percent_readings(gold: str, answer: str, question: str, in_gold: bool) -> list[tuple[str, str]]:
    """Return the pairs for a percent sign that only one of the two has. Both texts come without it."""
    signs = [match.start() for match in _PERCENT.finditer(question)]
    amounts = [_AMOUNT_BEFORE.search(question[max(0, at - 40) : at]) for at in signs]
    pairs = [(gold, answer)] if in_gold or signs or not question else []
    if None not in amounts:  # no percentage is asked for, so 20% may be written as 0.2
        number = _as_number(gold if in_gold else answer)
        share = None if number is None else _decimal(number / 100)
        copied = not in_gold and number in {_as_number(amount[1]) for amount in amounts if amount}
        if share is not None and not copied:
            pairs.append((share, answer) if in_gold else (gold, share))
    return pairs


def _decimal(number: Fraction) -> str | None:
    """Return a terminating decimal as text, or ``None`` for other fractions."""
    for places in range(305):
        if (number * 10**places).denominator == 1:
            digits = str(abs(int(number * 10**places))).zfill(places + 1)
            return (
                "-" if number < 0 else ""
            ) + f"{digits[: len(digits) - places]}.{digits[len(digits) - places :]}"
    return None


def _without_names(gold: str, answer: str) -> tuple[str, str]:
    """Rewrite ``x=4, y=5`` as ``(4, 5)`` if only one of the two is written that way."""
    named, answered = _assigned(gold), _assigned(answer)
    if named and "=" not in answer:
        listed = _parts(answer)
        return _tuple(named.values()), _tuple(listed) if len(listed) == len(named) else answer
    if answered and "=" not in gold:
        names = sorted(answered)
        in_a_row = all(len(name) == 1 and ord(name) == ord(names[0]) + at for at, name in enumerate(names))
        return gold, _tuple(answered[name] for name in (names if in_a_row else answered))
    return gold, answer


def _without_column(gold: str, answer: str) -> tuple[str, str]:
    """Rewrite a column vector as ``(1, 2)`` if only one of the two is a matrix."""
    columns = [_COLUMN.fullmatch(tidied(text)) for text in (gold, answer)]
    if "\\begin" in gold and "\\begin" in answer:
        return gold, answer
    first, second = (
        _tuple(entry.strip() for entry in column[2].split(r"\\")) if column else text
        for column, text in zip(columns, (gold, answer), strict=True)
    )
    return first, second


def _union(text: str) -> str:
    r"""Rewrite ``x < 2 \text{ or } x \ge 3`` as a union of intervals. Other texts stay unchanged."""
    bounds = [_BOUND.fullmatch(part.strip()) for part in _OR.split(tidied(text))]
    if len(bounds) < 2 or len({bound and bound[1] for bound in bounds}) > 1:
        return text
    intervals = []
    for bound in filter(None, bounds):
        end, closed = bound[3].strip(), re.fullmatch(r"[<>]|\\[lg]t", bound[2]) is None
        if re.match(r"[<≤]|\\l", bound[2]):
            intervals.append(rf"(-\infty, {end}{']' if closed else ')'}")
        else:
            intervals.append(rf"{'[' if closed else '('}{end}, \infty)")
    return r" \cup ".join(intervals) or text


def _tuple(values: Iterable[str]) -> str:
    return f"({', '.join(values)})"


def _parts(text: str) -> list[str]:
    """Return the entries of a list without brackets, or ``[]`` for one with brackets."""
    parts = [part.strip() for part in _SEPARATOR.split(tidied(text))]
    balanced = all(part.count(a) == part.count(b) for part in parts for a, b in ("()", "[]", "{}"))
    return parts if balanced else []


def _assigned(text: str) -> dict[str, str]:
    """Return the values of two or more different unknowns by name, or ``{}`` for other text."""
    parts = [_ASSIGNMENT.fullmatch(part) for part in _parts(text)] if "=" in text else []
    values = {part[1]: part[2].strip() for part in parts if part is not None}
    return values if 1 < len(values) == len(parts) else {}


def quick_verdict(gold: str, answer: str) -> bool | None:
    """Return whether two answers are equal, or ``None`` if that needs algebra.

    It decides equal texts, plain numbers, words and numbers with a base. Math-Verify reads a word as the product of its
    letters, so it accepts anagrams, and it ignores the base of a number.
    """
    if gold.strip() == answer.strip():
        return True
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    left, right = tidied(gold), tidied(answer)
    as_text = _TEXT.fullmatch(left)
    if left == right or (as_text and as_text[1].strip() == right):
        return True
    if not right:
        return False
    words = _as_words(gold)
    if words is not None:
        return words == _as_words(answer)
    if in_base := _IN_BASE.fullmatch(left):
        return _same_in_base(in_base[1], in_base[2], right)
    if (_is_list(left) and _ORDER.search(right)) or (_is_list(right) and _ORDER.search(left)):
        return False  # Math-Verify reads -2 < x < 1 as the two numbers -2 and 1
    first, second = _as_number(left), _as_number(right)
    if (
        first is None and "{" in left and "=" not in left and not has_variables(left)
    ):  # if the gold answer has no brackets, letters may be factors
        first = _as_number(without_unit(left))
    if first is not None and second is None:
        second = _as_number(without_unit(right))
    if first is None or second is None:
        return None
    if first == second:
        return True
    # Math-Verify rounds: leave close numbers to it.
    return False if abs(first - second) * 1000 > abs(first) else None


def is_unevaluated(gold: str, answer: str) -> bool:
    r"""Return whether the gold answer is one number and the answer is an expression that is not evaluated.

    See :mod:`afm.rewards.answer_form`. ``144/2`` is not an evaluated form of 72, but ``10/12`` is one of 5/6.
    """
    if is_equation(tidied(gold)) or has_variables(tidied(gold)):
        return False
    expected, actual = form_of(tidied(gold)), form_of(tidied(answer))
    if expected is None:
        return False
    return actual is None or (actual is Form.UNREDUCED and expected is Form.NUMBER)


def tidied(text: str) -> str:
    r"""Remove spacing commands, outer ``$``, digit grouping, a redundant ``\boxed`` and a final full stop."""
    text = _GROUPED.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    text = _NUMBER_AS_TEXT.sub(r"\1", _SIZES.sub("", text))
    text = " ".join(text.split()).strip("$ ").removesuffix(".").strip()
    boxed = _BOXED.fullmatch(text)
    text = boxed[1].strip() if boxed else text
    for spelling, plain in _SPELLINGS:
        text = spelling.sub(plain, text)
    return text


def _as_words(text: str) -> str | None:
    r"""Return the words of an answer that consists only of words or one ``\text{}``, else ``None``.

    ``xy``, ``ab - c`` and similar are products and differences of letters.
    """
    tidy = tidied(text)
    inner = _TEXT.fullmatch(tidy)
    if inner is None:
        in_words = _WORD.fullmatch(tidy) or re.fullmatch(r"\(?[A-Z]\)?", tidy)
        if not in_words or _SYMBOLS.fullmatch(tidy):
            return None
    plain = " ".join((inner[1] if inner else tidy).split()).strip("() .").casefold()
    return plain or None


def _is_list(text: str) -> bool:
    """Return whether ``text`` has several entries without brackets around them and compares nothing."""
    return not _ORDER.search(text) and len(_parts(text)) > 1


def _same_in_base(digits: str, base: str, answer: str) -> bool:
    answer = _BASE_IN_WORDS.sub(
        lambda match: f"_{match[2] or (_BASES.index(match[1]) + 2 if match[1] in _BASES else match[1])}",
        answer,
    )
    other = _IN_BASE.fullmatch(answer)
    if other is not None:
        return (other[1].lstrip("0"), other[2]) == (digits.lstrip("0"), base)
    return answer.lstrip("0") == digits.lstrip("0")


def _as_number(text: str) -> Fraction | None:
    if repeating := REPEATING.fullmatch(text.lstrip("+-")):
        return repeating_decimal(repeating) * (-1 if text.startswith("-") else 1)
    if amount := _AMOUNT.fullmatch(text):
        text = f"{amount[1]}{amount[2].replace(',', '')}{amount[3] or ''}"
    return Fraction(text) if _NUMBER.fullmatch(text) and text.strip("+-.") else None


def repeating_decimal(match: re.Match[str]) -> Fraction:
    r"""Return the number of a match of :data:`REPEATING`: 1/6 for ``0.1\overline{6}``."""
    whole, once, again = match[1], match[2], match[3] or match[4]
    nines = 10 ** len(again) - 1
    return Fraction(int(whole + once or "0") * nines + int(again), nines * 10 ** len(once))


_SYMBOL = re.compile(r"\\[A-Za-z]+|\d+|[A-Za-z]|\S")
_NOTATION = {r"\frac", r"\cdot", r"\times", *"1+-*/^_=.,(){}[]"}
_LONGEST = 400


def is_copied(gold: str, answer: str, question: str) -> bool:
    """Return whether ``answer``, which equals ``gold`` by algebra, occurs in the question and ``gold`` does not.

    The same value or the same terms in another notation (``1,000`` and ``1000``, ``y+x`` and ``x+y``) are not a copy,
    because there is nothing to work out between them.
    """
    gold, answer = tidied(gold), tidied(answer)
    form = form_of(gold)
    if (form is not None and form is form_of(answer)) or _terms(gold) == _terms(answer):
        return False
    return _stands_in(answer, question) and not _stands_in(gold, question)


def _terms(text: str) -> Counter[str]:
    return Counter(symbol for symbol in _SYMBOL.findall(text) if symbol not in _NOTATION)


def _stands_in(text: str, question: str) -> bool:
    """Return whether ``text`` occurs in the question as a whole, regardless of whitespace."""
    symbols = _SYMBOL.findall(text)
    if not symbols or len(text) > _LONGEST:
        return False
    pattern = r"\s*".join(map(re.escape, symbols))
    return re.search(rf"(?<![\w.\\]){pattern}(?!\w|\.\d)", tidied(question)) is not None
