r"""Whether an answer was copied out of the question instead of worked out.

``\sqrt{242}`` equals ``11\sqrt{2}``, but who was asked to simplify it and writes it down again has done nothing.
"""

from __future__ import annotations

import re
from collections import Counter

from afm.rewards.equality import tidied
from afm.rewards.worked_out import form_of

_SYMBOL = re.compile(r"\\[A-Za-z]+|\d+|[A-Za-z]|\S")
_NOTATION = {r"\frac", r"\cdot", r"\times", *"1+-*/^_=.,(){}[]"}
_LONGEST = 400


def is_copied(gold: str, answer: str, question: str) -> bool:
    """Whether ``answer``, which equals ``gold`` by algebra, stands in the question and ``gold`` does not.

    The same value or the same terms written another way (``1,000`` and ``1000``, ``y+x`` and ``x+y``) are no copy:
    there was nothing to work out between them.
    """
    gold, answer = tidied(gold), tidied(answer)
    form = form_of(gold)
    if (form is not None and form is form_of(answer)) or _terms(gold) == _terms(answer):
        return False
    return _stands_in(answer, question) and not _stands_in(gold, question)


def _terms(text: str) -> Counter[str]:
    return Counter(symbol for symbol in _SYMBOL.findall(text) if symbol not in _NOTATION)


def _stands_in(text: str, question: str) -> bool:
    """Whether ``text`` stands in the question as a whole, whatever the blanks in either."""
    symbols = _SYMBOL.findall(text)
    if not symbols or len(text) > _LONGEST:
        return False
    pattern = r"\s*".join(map(re.escape, symbols))
    return re.search(rf"(?<![\w.\\]){pattern}(?!\w|\.\d)", tidied(question)) is not None
