r"""Multiple choice: the one letter that the final answer names."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from afm.errors import DataError
from afm.rewards.base import Part
from afm.rewards.text_match import AnswerScorer, gold_answers

_DRESS = re.compile(
    r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}|\*+|(?<!\w)_+|_+(?!\w)|\$|`|\\[()\[\]]"
)
_BLANK = re.compile(r"\\[ ,;:!]|~")
_LEAD = (
    r"(?:(?:so|thus|hence|therefore),?\s+)?(?:i\s+(?:choose|pick)|it['’]s|it\s+is"
    r"|(?:(?:the|my|final|correct|best|right)\s+)*(?:answer|option|choice|letter)s?\s*(?:is|are)?\s*[:=]?)?\s*"
    r"(?:(?:option|choice|letter)\s+)?"
)
_IS_RIGHT = (
    r"is\s+(?:clearly\s+|indeed\s+|definitely\s+|the\s+)*"
    r"(?:(?:correct|right|best)(?:\s+(?:answer|option|choice|one))?|answer|option|choice)\b[.,:;!]?"
)
_LETTER = re.compile(
    rf"(?:{_LEAD})?[(\[{{\"']?([A-Za-z])(?:(?:[)\]]?\s+(?:{_IS_RIGHT}|[-\u2013\u2014])|[)\]}}\"'][.:,]?|[.,:])(?:\s+(.*))?"
    r"|\s+(\(.*\)))?",
    re.DOTALL | re.IGNORECASE,
)
_VERBS = r"(?:is|are|was|seems?|looks?|may|might|could|or|and|too|also|instead)\b"
_MENTION = re.compile(  # an option: (b), or a capital that is no word (a cat, I), no unit (5 J) and no symbol (F = ma)
    r"[(\[](?P<inside>[A-Ja-j])[)\]]"
    r"|(?<=[:;,] )(?P<small>[b-hj])(?=\W*$)"
    rf"|(?<![\w°'’-])(?<!\d )(?P<bare>[B-HJ]|A(?!\s+(?!{_VERBS})[a-z])|I(?!\s+[a-z]|['’]))(?![\w'’+-]|\s*=)"
)
_OPTION = r"[(\[]?(?P<{}>[A-HJ]|I(?!\s+[a-z]))\b"
_CLAIM = re.compile(  # an option is called the answer
    rf"(?i:\b(?:answer|option|choice)s?\b[^.;]{{0,20}}?\b(?:is|are|be)\b)\W*{_OPTION.format('named')}"
    rf"|{_OPTION.format('right')}[)\]]?\s+is\s+(?:also\s+)?(?:right|correct)"
    r"|(?i:\b(?:or|so|thus|hence|therefore|choose|pick|take|instead|rather|actually|maybe|perhaps)\b)\W+"
    rf"(?:(?i:the|answer|option|choice|is)\s+)*{_OPTION.format('chosen')}"
)
_NOT = r"(?:\s+not|n['’]t)\s+(?:the\s+)?"
_WRONG = rf"(?:is|was)(?:{_NOT}(?:right|correct|answer|best)|\s+(?:wrong|incorrect|false))\b"
_OTHERS = r"(?:[(\[]?[A-J][)\]]?(?:\s*,|\s+(?:and|or|nor))\s*)+(?:and\s+|or\s+)?[(\[]?[A-J]\b[)\]]?"
_REFUSED = re.compile(
    rf"(?i:\b(?:not|unlike|instead\s+of|rather\s+than))\s+(?P<others>{_OTHERS})"
    rf"|(?P<both>{_OTHERS})\s+are\s+(?i:(?:all|both)\s+)?(?i:wrong|incorrect|false)\b"
    rf"|(?i:\b(?:not|unlike|instead\s+of|rather\s+than))\s+{_OPTION.format('a')}[)\]]?"
    rf"|{_OPTION.format('b')}[)\]]?\s+{_WRONG}"
)
_RETRACTION = re.compile(
    r"\b(?:on\s+second\s+thoughts?|scratch\s+that|take\s+(?:it|that|this)\s+back|never\s?mind|just\s+kidding|"
    r"my\s+mistake|i\s+was\s+wrong|correction|oops|wait)\b"
    rf"|\b(?:which|this|that|it)\s+{_WRONG}"
    r"|\b(?:or|and|also)\s+(?:maybe\s+|perhaps\s+)?the\s+(?:other|first|second|third|fourth|last|next)\b",
    re.IGNORECASE,
)
_REASON = re.compile(r"(?:because|since|as)\b", re.IGNORECASE)  # it may name the other options
_LONGEST = 2000


def choice_letter(text: str, question: str = "") -> str | None:
    r"""The option that ``text`` names, a capital letter; ``None`` when it names none, several, or takes it back.

    Understood: ``C``, ``(c)``, ``C.``, ``C) because A is wrong``, ``\boxed{C}``, ``**C**``, ``Answer: C``, ``C is correct``,
    ``C, not D``. A letter that begins a sentence, as in ``A cat``, is no option. The text of an option, as in
    ``question`` behind the letter, may hold any letters.
    """
    bare = _BLANK.sub(" ", unicodedata.normalize("NFKC", text[:_LONGEST]))
    for _ in range(3):
        bare = _DRESS.sub(lambda match: match[1] or "", bare)
    named = _LETTER.fullmatch(bare.strip())
    if named is None:
        return None
    letter, rest = named[1].upper(), " ".join((named[2] or named[3] or "").split())
    return None if rest and _takes_back(letter, rest, question) else letter


def _takes_back(letter: str, rest: str, question: str) -> bool:
    """Whether what follows the letter names another option too, or denies this one."""
    option = rf"\b{letter}\s*[).:\]]\s*{re.escape(rest.rstrip('. '))}"
    if re.search(option, " ".join(question.split())):
        return False
    for refused in _REFUSED.finditer(rest):
        if letter in re.findall(
            r"\b[A-J]\b", refused["others"] or refused["both"] or refused["a"] or refused["b"]
        ):
            return True
    rest, reason = _REFUSED.sub("", rest), _REASON.match(rest) is not None
    claims = {option for claim in _CLAIM.finditer(rest) for option in claim.groups() if option}
    mentions = {
        option.upper() for mention in _MENTION.finditer(rest) for option in mention.groups() if option
    }
    return bool((claims if reason else claims | mentions) - {letter}) or (
        not reason and _RETRACTION.search(rest) is not None
    )


class ChoiceLetter(AnswerScorer):
    """1 when the final answer names the gold option and no other, else 0."""

    def accepted(self, ground_truth: Any) -> tuple[str, ...]:
        """The letter of the gold option."""
        golds = gold_answers(ground_truth)
        wanted = choice_letter(golds[0])
        if wanted is None or len(golds) > 1:
            raise DataError(f"ground truth {golds[0][:80]!r}: expected the letter of one option")
        return (wanted,)

    async def compare(
        self, accepted: tuple[str, ...], responses: tuple[str, ...], question: str = ""
    ) -> Part:
        """Compare the letter of the final answer with the gold letter."""
        (wanted,) = accepted
        letters = {choice_letter(text, question) for text in responses}
        if letters == {wanted}:
            return Part(1.0, f"option {wanted} is right")
        shown = ", ".join(sorted(letter or "none" for letter in letters))
        return Part(0.0, f"option named: {shown}, right: {wanted}")
