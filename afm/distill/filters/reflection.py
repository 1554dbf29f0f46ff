"""More trajectories in which the agent reflects on its work."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from afm.agents import AgentSpec
from afm.distill.filters.base import FilterSettings, Rule, draw, known_role, origin_of, steps_of
from afm.trajectory.record import Record


class ReflectionSettings(FilterSettings):
    """Which role, and how many of those without it stay.

    Attributes:
        role: The agent's role of reflection.
        keep_without: Probability of keeping a row that never takes that role.
    """

    role: str
    keep_without: float = Field(ge=0, le=1)


@dataclass(frozen=True)
class ReflectionFilter(Rule):
    """Rejection-samples rows without reflection away.

    Whether a row stays depends on the seed and :func:`origin_of` alone, so the same rows stay in any order, in any
    number of processes, and whatever other rows there are.

    Raises:
        ConfigError: The agent has no such role.
    """

    spec: AgentSpec
    settings: ReflectionSettings
    seed: int = 0
    name: str = "reflection"

    def __post_init__(self) -> None:
        known_role(self.settings.role, self.spec, self.name)

    def reason(self, record: Record) -> str:
        """Draws for a row that does not reflect."""
        role, keep = self.settings.role, self.settings.keep_without
        if any(step.role == role and step.content.strip() for step in steps_of(record, self.spec)):
            return ""
        drawn = draw(self.seed, self.name, origin_of(record))
        return "" if drawn < keep else f"no <{role}>, drew {drawn:.4f}, expected below {keep:g}"
