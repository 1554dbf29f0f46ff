r"""Tell an answer that is a value from an expression that is still to be evaluated.

``60+12``, ``6 × 12`` and a sum equal 72, but do not state 72. To accept them would reward copying the question.
A list of forms defines the values, instead of a list of forbidden operators, because there are too many operators.
"""

from __future__ import annotations

import math
import re
import unicodedata
from enum import StrEnum

_GROUP = r"(?:,|\{,\}|\\,|\\ |[ \u00a0\u2009\u202f])"
_DIGITS = rf"(?:\d{{1,3}}(?:{_GROUP}\d{{3}})+|\d+)"
_DECIMALS = r"(?:\.\d*(?:\\overline\{\d+\}|\(\d+\))?)"
_NUMBER = rf"(?:{_DIGITS}{_DECIMALS}?|\.\d+)"
_POWER_OF_TEN = r"(?:\s*(?:×|\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*[+-]?\d+\s*\}|\d+)|[eE][+-]?\d+)"
_CURRENCY = r"(?:\\?\$|\\pounds|\\euro|[£€¥])"
_UNIT_WORD = r"[A-Za-z][A-Za-z.°]*(?:\s*\^\s*\{?\s*-?\d\s*\}?)?"
_SYMBOL = rf"{_CURRENCY}|\\?%|°|\^\s*\{{?\s*\\circ\s*\}}?|\\degree"
_UNIT = rf"(?:\s*(?:{_SYMBOL})|(?:\s+|\\ |\\,|~)*{_UNIT_WORD}(?:(?:\s*/\s*|\s+|\\cdot\s*){_UNIT_WORD})*)"
_NOT_UNITS = (  # number words and the closed classes of words, which change the number before them
    "hundred thousand million billion trillion dozen gross half halves double twice triple squared cubed factorial inverse "
    "one two three four five six seven eight nine ten plus minus over choose mod modulo base or and but nor not no never "
    "neither either none more less fewer most least greater larger smaller below about approximately roughly nearly almost "
    "than to so if maybe perhaps possibly probably is are was were be equals unless except without wrong false incorrect "
    "negative pi lakh crore sin cos tan sinh cosh tanh log ln bn mn hundredth thousandth versus vs otherwise instead divided "
    "eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty "
    "ninety zero tenth quarter times remainder permille exp mil"
)
_SI = "m s g h d t l L N K C F J W V A H T"
_BARE_UNITS = "cm mm km dm kg mg ml dl ft in yd mi lb lbs oz hr hrs min sec mph kph am pm"
_SIGN = r"[+-]?\s*"

_VALUE = re.compile(
    rf"{_SIGN}{_CURRENCY}?\s*{_SIGN}{_NUMBER}{_POWER_OF_TEN}?(?:_\{{?10\}}?)?(?P<unit>{_UNIT})?\s*"
)
_FRACTION = re.compile(
    rf"{_SIGN}(?P<whole>\d+\s*)?(?:\\frac\s*(?:\{{\s*(?P<a>-?\d+)\s*\}}|(?P<b>\d))\s*"
    rf"(?:\{{\s*(?P<c>-?\d+)\s*\}}|(?P<d>\d))|(?P<e>\d+)\s*/\s*(?P<f>-?\d+))(?P<unit>{_UNIT})?\s*"
)
_NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([^()=]*\))?\s*")
_WRAPPED = re.compile(
    r"\\(mathbf|boldsymbol|bf|mathrm|mathit|text|textbf|textnormal|mathsf|operatorname|mbox)\s*\{([^{}]*)\}"
)
_RELATION = re.compile(r"[<>!~≠≤≥≈]|\\(?:not|neq?|[lg]e?q?|[lg]t|approx|sim|equiv|in)(?![A-Za-z])")
_ARITHMETIC = re.compile(r"[\d+*/^-]")
_LONGEST = 400


class Form(StrEnum):
    """How a value is written."""

    NUMBER = "number"
    """With sign, separators, currency, unit, power of ten."""
    FRACTION = "fraction"
    """In lowest terms."""
    UNREDUCED = "unreduced"
    """A fraction that is not in lowest terms, or equals a whole number: 144/2 is still to be evaluated."""


def form_of(answer: str) -> Form | None:
    r"""Return the form of the one value in ``answer``, also in ``x = 72``, or ``None`` if it is not a value.

    An exact value may be followed by a rounded one (``1/3 \approx 0.33``).

    Args:
        answer: LaTeX or plain text, already without ``\boxed``.
    """
    if len(answer) > _LONGEST:
        return None
    *before, value = _plain(answer).removeprefix("\\approx").split("=")
    exact, about, rounded = value.partition("\\approx")
    if about and not before and _NAME.fullmatch(exact.strip()):
        before, value = [exact], rounded
    elif about and re.fullmatch(rf"\s*{_SIGN}{_NUMBER}\s*", rounded):
        value = exact
    if before and not _leads_to(before):
        return None
    value = _unwrapped(value.strip())
    number = _VALUE.fullmatch(value)
    fraction = None if number else _FRACTION.fullmatch(value)
    unit = (number or fraction or {"unit": None})["unit"]
    words = re.findall(r"[a-z]+", (unit or "").lower())
    if set(_NOT_UNITS.split()).intersection([*words, *(word.removesuffix("s") for word in words)]):
        return None
    if fraction is not None:
        return Form.FRACTION if _is_reduced(fraction) else Form.UNREDUCED
    return Form.NUMBER if number else None


def without_unit(answer: str) -> str:
    """Return the number in ``x = 7,200`` or ``72 cm^2``, or ``answer`` unchanged if a letter may be a factor (``72x``)."""
    parts = _plain(answer).split("=") if len(answer) <= _LONGEST else [""]
    before, value = parts[:-1], _unwrapped(parts[-1])
    number = _VALUE.fullmatch(value)
    if number is None or form_of(answer) is None or len(before) > 1 or not all(map(_NAME.fullmatch, before)):
        return answer
    if number["unit"] is None:
        return value
    words = re.findall(r"[A-Za-z]+", number["unit"])
    if not words or (len(words[0]) == 1 and words[0] not in _SI.split()) or number["unit"][0] != " ":
        return answer
    return value[: number.start("unit")]


def has_variables(text: str) -> bool:
    """Return whether a letter of ``text`` may be a variable (``4t``, ``2xy``), and is no unit (``4 inches``)."""
    bare = _WRAPPED.sub(lambda wrapped: "" if _is_unit(wrapped) else wrapped[2], text.rpartition("=")[2])
    bare = re.sub(r"\\[A-Za-z]+|(?<![A-Za-z])(?:[ck]?m|ft|mi)\s*/\s*[hs](?![A-Za-z])", "", bare)
    words = [(word[0], bare[: word.start()][-1:].isspace()) for word in re.finditer(r"[A-Za-z]+", bare)]
    return any(word not in _BARE_UNITS.split() and not (apart and len(word) > 2) for word, apart in words)


def _is_unit(wrapped: re.Match[str]) -> bool:
    inner, upright = wrapped[2].strip(), wrapped[1] in ("mathrm", "text", "mathsf", "operatorname", "mbox")
    return len(inner) != 1 or not inner.isalpha() or (upright and inner in _SI.split())


def _plain(text: str) -> str:
    """Return letters, digits and minus signs in their ordinary form, without text and number wrappers."""
    text = unicodedata.normalize("NFKC", text).replace("\u2212", "-").replace("\u2013", "-")
    for _ in range(3):
        text = _WRAPPED.sub(_bare, text)
    return " ".join(text.split())


def _bare(wrapped: re.Match[str]) -> str:
    """Return the content of a wrapper. A single letter that cannot be a unit becomes a command, because it is a symbol."""
    return f" {wrapped[2]} " if _is_unit(wrapped) else f" \\{wrapped[2].strip()} "


def is_equation(text: str) -> bool:
    """Return whether ``text`` relates quantities (``2x+4y-3=0``, ``x=4, y=5``), beyond ``name = value``."""
    *before, _ = _plain(text).split("=")
    return len(before) > 1 or any(not _NAME.fullmatch(part) and _ARITHMETIC.search(part) for part in before)


def _leads_to(before: list[str]) -> bool:
    """Return whether the text before the last ``=`` is finished work (``60 + 12 = 72``) or the quantity (``m+n = 72``)."""
    return all(
        part.strip() and not _RELATION.search(part) and not _VALUE.fullmatch(_unwrapped(part.strip()))
        for part in before
    )


def _unwrapped(value: str) -> str:
    """Remove one pair of brackets or dollar signs around everything."""
    value = value.strip()
    for opening, closing in (("(", ")"), ("{", "}"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        inner = value[len(opening) : -len(closing)]
        if opening in "({" and "," in inner:
            continue  # a pair or a set, not a number with separators
        if len(value) > 1 and value.startswith(opening) and value.endswith(closing) and closing not in inner:
            return inner.strip()
    return value


def _is_reduced(fraction: re.Match[str]) -> bool:
    above = int(fraction["a"] or fraction["b"] or fraction["e"])
    below = abs(int(fraction["c"] or fraction["d"] or fraction["f"]))
    return below > 1 and math.gcd(above, below) == 1
