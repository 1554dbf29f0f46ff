"""The teacher: a scripted team. Its work becomes the examples that the model learns from.

The clerk looks up about half of the dates and knows the others by heart. The model does not know them. It copies the
habit and answers wrongly. In reinforcement learning it learns to use the tool instead.
"""

from __future__ import annotations

import random

from afm.distill.event_log import Recorder
from afm.rewards.text_match import gold_answers

KNOWN_SHARE = 0.5


class WeekdayTeam:
    """One clerk."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    async def solve(self, recorder: Recorder) -> None:
        """Solve one question: say something, use the tool, finish."""
        task = recorder.task
        day = task.question.rstrip("?").split()[-1]
        if random.Random(f"{self._seed}/{task.id}").random() < KNOWN_SHARE:
            recorder.say("clerk", "I know this one.")
            recorder.finish("clerk", gold_answers(task.ground_truth)[0])
            return
        recorder.say("clerk", "Look it up.")
        result = await recorder.use("clerk", "weekday", day)
        recorder.say("clerk", "Done.")
        recorder.finish("clerk", result.text)
