"""Whether the response keeps the rules of its agent."""

from __future__ import annotations

from afm.rewards.base import Sample
from afm.rewards.part import Part
from afm.trajectory import validate


class FormatCheck:
    """1 when the response is valid for its agent, else 0 with the first fault as evidence."""

    async def judge(self, sample: Sample) -> Part:
        """Validate the response by author."""
        faults = validate(sample.segments, sample.spec)
        return Part(0.0, f"format: {faults[0].message}") if faults else Part(1.0)

    async def close(self) -> None:
        """Nothing to free."""
