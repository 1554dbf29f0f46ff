"""A scorer of programs for tests on a machine that other tests keep busy."""

import asyncio

from afm.rewards import Sample
from afm.rewards.base import Part
from afm.rewards.code_tests import CodeTests

STARVED = ("overloaded", "the tests wait for an answer")
"""In the evidence of a program that the machine starved: they say nothing about the program. The second one has a limit
of 5 s by the clock."""
ROUNDS, PAUSE_S = 12, 5.0


class PatientScorer(CodeTests):
    """Judges again, a little later, when the machine starved the program."""

    async def judge(self, sample: Sample) -> Part:
        for _ in range(ROUNDS):
            part = await super().judge(sample)
            if part.score is not None or not any(sign in part.evidence for sign in STARVED):
                break
            await asyncio.sleep(PAUSE_S)
        return part
