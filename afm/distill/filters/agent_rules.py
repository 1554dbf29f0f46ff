"""Does a trajectory keep the rules that its agent declares?"""

from __future__ import annotations

from dataclasses import dataclass

from afm.agents import AgentSpec
from afm.distill.filters.base import FilterSettings, Rule, segments_of, split_of
from afm.trajectory import validate
from afm.trajectory.record import Record


class FormatSettings(FilterSettings):
    """Nothing to set: the agent's declaration says it all."""


@dataclass(frozen=True)
class FormatFilter(Rule):
    """Keeps what the agent's declaration accepts: structure, transitions, authors."""

    spec: AgentSpec
    name: str = "format"

    def reason(self, record: Record) -> str:
        """The first fault that :func:`afm.trajectory.validate` finds."""
        issues = validate(segments_of(record), self.spec, found=split_of(record, self.spec))
        return str(issues[0]) if issues else ""
