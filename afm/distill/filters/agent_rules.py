"""Does a trajectory keep the rules that its agent declares, and call tools as they can be called?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from afm.agents import AgentSpec
from afm.distill.filters.base import FilterSettings, Rule, segments_of, split_of
from afm.tools.arguments import Reader, faults_of, usual_readers
from afm.trajectory.record import Record


class FormatSettings(FilterSettings):
    """The agent's declaration says nearly all.

    Attributes:
        tools: Tools YAML whose classes read the calls; by default the shipped tools, by their names.
    """

    tools: Path | None = None


@dataclass(frozen=True)
class FormatFilter(Rule):
    """Keeps what the agent's declaration accepts (structure, transitions, authors), with calls that the tools can read."""

    spec: AgentSpec
    readers: Mapping[str, Reader] = field(default_factory=usual_readers)
    name: str = "format"

    def reason(self, record: Record) -> str:
        """The first fault that :func:`afm.tools.arguments.faults_of` finds."""
        issues = faults_of(
            segments_of(record), self.spec, found=split_of(record, self.spec), readers=self.readers
        )
        return str(issues[0]) if issues else ""
