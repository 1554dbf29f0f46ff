"""Did the question need work?"""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from afm.agents import AgentSpec
from afm.distill.filters.base import FilterSettings, Rule, steps_of
from afm.errors import ConfigError
from afm.trajectory.record import Record


class ComplexitySettings(FilterSettings):
    """How much work with tools a trajectory shows.

    Attributes:
        min_calls: Least number of tool interactions. The default is AFM's (arXiv 2508.13167).
        min_tools: Least number of different tools among them.
    """

    min_calls: int = Field(default=5, ge=1, le=1000)
    min_tools: int = Field(default=1, ge=1, le=100)


@dataclass(frozen=True)
class ComplexityFilter(Rule):
    """Drops what was answered with few tool interactions, or with few tools: it teaches little about tools.

    Raises:
        ConfigError: The agent has fewer tools than ``min_tools``, so that it could keep nothing.
    """

    spec: AgentSpec
    settings: ComplexitySettings = field(default_factory=ComplexitySettings)
    name: str = "complexity"

    def __post_init__(self) -> None:
        known = sorted(set(self.spec.tool_roles.values()))
        if self.settings.min_tools > len(known):
            raise ConfigError(
                f"filter {self.name!r}: min_tools: got {self.settings.min_tools}, agent {self.spec.name!r} has {len(known)}: "
                f"{', '.join(known) or 'none'}"
            )

    def reason(self, record: Record) -> str:
        """Counts closed calls of the agent's tools, and the tools."""
        tools = self.spec.tool_roles
        called = [tools[step.role] for step in steps_of(record, self.spec) if step.role in tools]
        if len(called) < self.settings.min_calls:
            return f"{len(called)} tool interactions, expected at least {self.settings.min_calls}"
        if len(set(called)) < self.settings.min_tools:
            return f"calls {', '.join(sorted(set(called)))} alone, expected at least {self.settings.min_tools} tools"
        return ""
