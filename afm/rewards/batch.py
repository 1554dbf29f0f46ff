"""Many responses at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from afm.rewards.base import Reward, Sample
from afm.trajectory.record import Verdict


async def score_many(reward: Reward, samples: Iterable[Sample], *, parallel: int = 64) -> list[Verdict]:
    """Verdicts in the order of ``samples``, up to ``parallel`` of them worked on at the same time.

    Raises:
        AfmError: What the first failing sample raised, e.g. no scorer for its data source; the others are cancelled.
    """
    gate = asyncio.Semaphore(parallel)

    async def one(sample: Sample) -> Verdict:
        async with gate:
            return await reward.score(sample)

    tasks = [asyncio.create_task(one(sample)) for sample in samples]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
