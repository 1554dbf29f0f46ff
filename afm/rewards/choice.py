r"""Multiple choice: the one letter that the final answer names."""

from __future__ import annotations

import re

from afm.errors import DataError
from afm.rewards.base import Sample
from afm.rewards.gold import gold_answers
from afm.rewards.part import Part
from afm.trajectory import answers

_DRESS = re.compile(r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}|\*\*|\$|`")
_LEAD = r"(?:(?:the|my|final|correct|best|right)\s+)*(?:answer|option|choice)s?\s*(?:is|are)?\s*[:=]?\s*"
_LETTER = re.compile(
    rf"(?:{_LEAD})?[(\[]?([A-Za-z])(?:(?:[)\]][.:,]?|[.:,])(?:\s+(.*))?)?", re.DOTALL | re.IGNORECASE
)
_OPTION = r"[(\[]?(?:[A-HJ]|I(?!\s+[a-z]))\b"
_ANOTHER = re.compile(  # a second option: (B), B., or B; or nothing but letters
    r"[(\[][A-J][)\]]|\b[A-J][).:](?=\s)|^[A-J]\b[,/|;&.]?\s*(?:$|[A-J]\b)"
    r"|(?i:\b(?:or|and|also|but|then|actually|maybe|perhaps|possibly)\b)[\s,]+"
    rf"(?:(?i:maybe|perhaps|possibly|even|the|answer|option|choice)\s+)*{_OPTION}"
)
_CLAIM = re.compile(  # another option is called the answer
    rf"(?i:\b(?:answer|option|choice)s?\b[^.;]{{0,20}}?\b(?:is|are|be)\b)\W*{_OPTION}"
    rf"|{_OPTION}[)\]]?\s+is\s+(?:also\s+)?(?:right|correct)"
    r"|(?i:\b(?:so|thus|hence|therefore|choose|pick|take|instead|rather)\b)\W+"
    rf"(?:(?i:the|answer|option|choice|is)\s+)*{_OPTION}"
)
_REASON = re.compile(r"(?:because|since|as)\b", re.IGNORECASE)  # it may name the other options
_LONGEST = 2000


def choice_letter(text: str) -> str | None:
    r"""The option that ``text`` names, a capital letter; ``None`` when it names none or several.

    Understood: ``C``, ``(c)``, ``C.``, ``C) because A is wrong``, ``\boxed{C}``, ``**C**``, ``Answer: C``. A letter
    that begins a sentence, as in ``A cat``, is no option.
    """
    bare = text[:_LONGEST]
    for _ in range(3):
        bare = _DRESS.sub(lambda found: found[1] or "", bare)
    found = _LETTER.fullmatch(bare.strip())
    if found is None:
        return None
    rest = found[2] or ""
    if _CLAIM.search(rest) or (not _REASON.match(rest) and _ANOTHER.search(rest)):
        return None
    return found[1].upper()


class ChoiceLetter:
    """1 when the final answer names the gold option and no other, else 0."""

    async def judge(self, sample: Sample) -> Part:
        """Compare the letter of the final answer with the gold letter."""
        try:
            golds = gold_answers(sample.ground_truth)
        except DataError as error:
            return Part(None, error.message)
        wanted = choice_letter(golds[0])
        if wanted is None or len(golds) > 1:
            return Part(None, f"ground truth {golds[0][:80]!r}: expected the letter of one option")
        given = answers(sample.segments, sample.spec)
        if not given:
            return Part(0.0, "the response has no final answer")
        letters = {choice_letter(text) for text in given}
        if letters == {wanted}:
            return Part(1.0, f"option {wanted} is right")
        shown = ", ".join(sorted(letter or "none" for letter in letters))
        return Part(0.0, f"option named: {shown}, right: {wanted}")

    async def close(self) -> None:
        """Nothing to free."""
