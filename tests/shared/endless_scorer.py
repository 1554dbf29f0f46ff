"""A scorer without an upper end, which is no reward."""

from __future__ import annotations

from afm.rewards import Sample
from afm.rewards.base import Part


class Endless:
    """Gives whatever it reads more points than there are."""

    async def judge(self, sample: Sample) -> Part:
        return Part(float("inf"))

    async def close(self) -> None:
        pass
