"""More trajectories in which the agent finds its own mistake."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from pydantic import Field

from afm.agents import AgentSpec, Grade
from afm.distill.filters.base import COPY_OF, FilterSettings, known_role, noted, origin_of, steps_of
from afm.errors import ConfigError
from afm.trajectory.record import Record


class CorrectionSettings(FilterSettings):
    """How often corrected work is repeated.

    Attributes:
        times: How often such a row stands in the result.
        role: The graded role that checks an answer; by default the one whose good grade lets the agent answer.
            An agent without one has no such rows.
        min_score: From this score on the answer is right.
    """

    times: int = Field(default=3, ge=2, le=100)
    role: str | None = None
    min_score: float = Field(default=1.0, allow_inf_nan=False)


@dataclass(frozen=True)
class Correction:
    """Repeats rows whose first check was rejected and whose answer is right in the end.

    Nothing is dropped. A row without a verdict is not repeated, since nobody knows that it is right.

    Raises:
        ConfigError: The agent has no such role, or the role is not graded.
    """

    spec: AgentSpec
    settings: CorrectionSettings = field(default_factory=CorrectionSettings)
    name: str = "correction"

    def __post_init__(self) -> None:
        role = self.settings.role
        if role is not None and self.spec.roles[known_role(role, self.spec, self.name)].grade is None:
            raise ConfigError(f"filter {self.name!r}: role {role!r} of {self.spec.name!r} has no grade")

    @cached_property
    def role(self) -> str | None:
        """The role that checks answers, ``None`` when the agent has none."""
        return self.settings.role or checking_role(self.spec)

    def apply(self, record: Record) -> Record:
        """The record as it is; see :meth:`copies`."""
        return record

    async def check(self, record: Record) -> Record:
        """The record as it is; see :meth:`copies`."""
        return record

    def copies(self, record: Record) -> Iterator[Record]:
        """The further rows of a kept record, each with an id and a provenance that tell it from the first."""
        if not self._corrected(record):
            return
        for number in range(2, self.settings.times + 1):
            provenance = noted(record, {COPY_OF: origin_of(record), "copy": number})
            yield record.model_copy(update={"id": f"{record.identity}+{number}", "provenance": provenance})

    def _corrected(self, record: Record) -> bool:
        score = record.verdict.score if record.verdict is not None else None
        role = self.role
        if role is None or score is None or score < self.settings.min_score:
            return False
        grade = self.spec.roles[role].grade
        first = next((step for step in steps_of(record, self.spec) if step.role == role), None)
        return first is not None and grade is not None and bool(grade.rejects(first.content))


def checking_role(spec: AgentSpec) -> str | None:
    """The role whose good grade lets the agent answer, and whose bad one does not."""

    def decides(grade: Grade | None) -> bool:
        return (
            grade is not None
            and spec.answer_role in grade.when_accepted
            and spec.answer_role not in grade.when_rejected
        )

    return next((tag for tag, role in spec.roles.items() if decides(role.grade)), None)
