"""One part of a verdict, and what produces it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from afm.rewards.base import Sample


@dataclass(frozen=True, slots=True)
class Part:
    """A number with its reason; ``score`` is ``None`` when the scorer could not tell (it abstains)."""

    score: float | None
    evidence: str = ""


class Scorer(Protocol):
    """Judges one aspect of a response: its answer, its format, its length."""

    async def judge(self, sample: Sample) -> Part:
        """The part for ``sample``; does not raise for anything the response contains."""
        ...

    async def close(self) -> None:
        """Free worker processes."""
        ...


@runtime_checkable
class FormScorer(Protocol):
    """A scorer whose replies have a format of their own, which counts in place of the agent's."""

    async def form(self, sample: Sample) -> Part:
        """1 when the reply has it, else 0."""
        ...
