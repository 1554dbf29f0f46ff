"""Does the agent ask a tool what it has asked before?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from pydantic import Field

from afm.agents import AgentSpec
from afm.distill.filters.base import FilterSettings, Rule, steps_of
from afm.trajectory.programs import call_form, exact_form, is_program
from afm.trajectory.record import Record

_WORD = re.compile(r"\w+")


class RepetitionSettings(FilterSettings):
    """What counts as asked before.

    Attributes:
        max_repeats: So many calls of a row may repeat an earlier one.
        similar: Share of common words (Jaccard) from which a call is redundant; words with digits must be the
            same. ``null``: only the same text counts, blanks at the ends of lines aside. Programs are always compared so.
    """

    max_repeats: int = Field(default=0, ge=0, le=1000)
    similar: float | None = Field(default=0.9, gt=0, le=1)


@dataclass(frozen=True, slots=True)
class _Call:
    number: int
    role: str
    text: str
    form: str
    words: frozenset[str]

    def repeats(self, earlier: _Call, similar: float | None) -> bool:
        if self.role != earlier.role:
            return False
        if self.form == earlier.form:
            return True
        if similar is None or not self.words or not earlier.words:
            return False
        shared = len(self.words & earlier.words)
        if shared < similar * len(self.words | earlier.words):
            return False
        return not any(any(map(str.isdigit, word)) for word in self.words ^ earlier.words)


@dataclass(frozen=True)
class RepetitionFilter(Rule):
    """Drops rows whose tool inputs are duplicates of, or redundant beside, earlier ones."""

    spec: AgentSpec
    settings: RepetitionSettings = field(default_factory=RepetitionSettings)
    name: str = "repetition"

    def reason(self, record: Record) -> str:
        """Compares every call with those before it by the same tool."""
        repeats = list(self._repeats(record))
        if len(repeats) <= self.settings.max_repeats:
            return ""
        again, earlier = repeats[0]
        more = f" ({len(repeats)} repeated calls in all)" if len(repeats) > 1 else ""
        return f"call {again.number} <{again.role}> repeats call {earlier.number}: {again.text[:80]!r}{more}"

    def _repeats(self, record: Record) -> Iterator[tuple[_Call, _Call]]:
        calls: list[_Call] = []
        for step in steps_of(record, self.spec):
            if step.role not in self.spec.tool_roles:
                continue
            call = self._call(len(calls) + 1, step.role, step.content)
            earlier = next((old for old in calls if call.repeats(old, self.settings.similar)), None)
            if earlier is not None:
                yield call, earlier
            calls.append(call)

    def _call(self, number: int, role: str, content: str) -> _Call:
        text, tool = " ".join(content.split()), self.spec.tool_roles[role]
        exact = self.settings.similar is None or is_program(tool, content)
        form = exact_form(content) if exact else call_form(tool, content)
        return _Call(number, role, text, form, frozenset(() if exact else _WORD.findall(text.casefold())))
