"""Signs that make another question of the same words: ``3.5 * 2`` is not ``35 / 2``, ``x > 2`` not ``x < 2``.

Punctuation says nothing in prose, where it may be changed to hide a copy. It does between numbers and variables and within formulas.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right

from afm.trajectory.observation import readable

_OPERATORS = "-+*/^<>=!.#"
MARKS = f"\ue000-{chr(0xE000 + len(_OPERATORS) - 1)}"
"""What :func:`with_marks` writes for signs, for a class of a regular expression."""
_MARK = {sign: f" {chr(0xE000 + place)} " for place, sign in enumerate(_OPERATORS)}
_SAME = str.maketrans(
    {
        "\u2010": "-",
        "\u2011": "-",
        "\u2012": "-",
        "\u2013": "-",
        "\u2014": "-",
        "\u2212": "-",
        "\u00d7": "*",
        "\u22c5": "*",
        "\u00b7": "*",
        "\u00f7": "/",
        "\u2215": "/",
        "\u2264": "<=",
        "\u2265": ">=",
    }
    | dict.fromkeys(map(chr, range(0xE000, 0xE000 + len(_OPERATORS))), " ")
)
_FORMULA = re.compile(
    r"\$\$.{1,2000}?\$\$|\$(?=[^\s$])[^$]{0,1000}?(?<=[^\s$])\$(?!\d)|\\\(.{1,1000}?\\\)|\\\[.{1,2000}?\\\]",
    re.DOTALL,
)
_ANY = re.compile(f"[{re.escape(_OPERATORS)}]")
_SIGNS = re.compile(r"(?<=\d)\.(?=\d)|[-+*/^<>=]+|[!#]")
_LAST = re.compile(r"(?:[\d)\]}]|(?<![^\W\d_])[^\W\d_])\s*\Z")
"""A number, a closing bracket or a letter by itself, at the end."""
_FIRST = re.compile(r"\s*(?:[-+\d(\[{\\$]|[^\W\d_](?![^\W\d_]))")
"""A number with its sign, an opening bracket, a command of LaTeX or a letter by itself, at the begin."""
_ARTICLE = re.compile(r"\s+(?:a|A|I)\s+[^\W\d_]{2}")
"""Words that are a letter by themselves, before another word: the dash before them is one of prose."""
_NUMBER = re.compile(r"[\d.(]|[^\W\d_](?![^\W_])")
_TAG = re.compile(
    r"</?(?:b|i|u|p|em|br|hr|strong|code|pre|li|ul|ol|h\d|span|div|center)\s*/?>", re.IGNORECASE
)
_LONGEST = 3
_NEAR = 8


def with_marks(text: str) -> str:
    r"""``text`` in one form of its letters, with a character of its own for every sign that matters, blanks around it.

    These are operators within formulas (``$...$``, ``\(...\)``, ``\[...\]``), operators between numbers and letters that stand by
    themselves, the sign of a number, decimal points, and the signs of ``C++`` and ``C#``. All others stay what they are;
    simple tags of HTML go.
    """
    if "<" in text:
        text = _TAG.sub(" ", text)
    if not text.isascii():
        text = unicodedata.normalize("NFKC", readable(text)).translate(_SAME)
    if _ANY.search(text) is None:
        return text
    formulas = [found.span() for found in _FORMULA.finditer(text)]
    starts = [start for start, _ in formulas]

    def mark(found: re.Match[str]) -> str:
        signs = found[0]
        if set(signs) == {"-"} and len(signs) <= _LONGEST:
            signs = "-"
        place = bisect_right(starts, found.start()) - 1
        inside = place >= 0 and found.start() < formulas[place][1]
        if len(signs) <= _LONGEST and (inside or _matters(text, found)):
            return "".join(_MARK[sign] for sign in signs)
        return found[0]

    return _SIGNS.sub(mark, text)


def _matters(text: str, found: re.Match[str]) -> bool:
    """Whether signs outside of formulas make a difference."""
    start, end, signs = found.start(), found.end(), found[0]
    if signs == ".":
        return True
    before, after = text[max(0, start - _NEAR) : start], text[end : end + _NEAR]
    alone = bool(before) and bool(_LAST.search(before)) and not before[-1].isspace()
    if signs in ("#", "++"):
        if alone and before[-1].isalpha():
            return True
        if signs == "#":
            return False
    if signs == "!":
        return False
    if signs == "-" and before[-1:].isspace() and _ARTICLE.match(after):
        return False
    if _LAST.search(before) and _FIRST.match(after):
        return True
    ends = before.rstrip()
    opened = not before or before[-1].isspace() or ends[-1:] in "([{,=<>*/^+"
    return signs in ("-", "+") and opened and bool(_NUMBER.match(after))
