"""Did the question need work?"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from afm.agents import AgentSpec
from afm.distill.filters.base import FilterSettings, Rule, steps_of
from afm.trajectory.record import Record


class ComplexitySettings(FilterSettings):
    """Least number of tool interactions. The default is AFM's (arXiv 2508.13167)."""

    min_calls: int = Field(default=5, ge=1, le=1000)


@dataclass(frozen=True)
class ComplexityFilter(Rule):
    """Drops what was answered with few tool interactions: it teaches little about tools."""

    spec: AgentSpec
    settings: ComplexitySettings = field(default_factory=ComplexitySettings)
    name: str = "complexity"

    def reason(self, record: Record) -> str:
        """Counts closed calls of the agent's tools."""
        calls = sum(step.role in self.spec.tool_roles for step in steps_of(record, self.spec))
        if calls >= self.settings.min_calls:
            return ""
        return f"{calls} tool interactions, expected at least {self.settings.min_calls}"
