"""The reward: a class whose ``judge`` gives a response a score from 0 to 1."""

from __future__ import annotations

from afm.rewards import Sample
from afm.rewards.base import Part
from afm.rewards.text_match import gold_answers
from afm.trajectory import answers


class SameDay:
    """1 if the answer names the right day. ``Sat`` counts as ``Saturday``."""

    async def judge(self, sample: Sample) -> Part:
        """Compare the agent's answer with the gold answer."""
        named = answers(sample.segments, sample.spec)
        [right] = gold_answers(sample.ground_truth)
        if len(named) != 1:
            return Part(0.0, f"expected {right}, got {' and '.join(named) or 'no day'}")
        short = named[0].strip().lower()
        same = len(short) >= 3 and right.lower().startswith(short)
        return Part(float(same), f"expected {right}, got {named[0]}")

    async def close(self) -> None:
        """Release resources. This scorer holds none."""
