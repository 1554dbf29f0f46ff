"""Does a trajectory keep the rules that its agent declares, and call tools as they can be called?"""

from __future__ import annotations

from dataclasses import dataclass

from afm.agents import AgentSpec
from afm.distill.filters.base import FilterSettings, Rule, segments_of, split_of
from afm.tools.arguments import faults_of
from afm.trajectory.record import Record


class FormatSettings(FilterSettings):
    """Nothing to set: the agent's declaration says it all."""


@dataclass(frozen=True)
class FormatFilter(Rule):
    """Keeps what the agent's declaration accepts (structure, transitions, authors), with calls that the tools can read."""

    spec: AgentSpec
    name: str = "format"

    def reason(self, record: Record) -> str:
        """The first fault that :func:`afm.tools.arguments.faults_of` finds."""
        issues = faults_of(segments_of(record), self.spec, found=split_of(record, self.spec))
        return str(issues[0]) if issues else ""
