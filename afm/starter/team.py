"""The teacher: a scripted team. Its work becomes the examples that the model learns from.

The clerk guesses most dates and looks up the others. The filters keep right answers only, so lucky guesses stay: about
half of the examples. The model copies the habit and answers wrongly. In reinforcement learning it learns to use the
tool instead.
"""

from __future__ import annotations

import random

from afm.distill.event_log import Recorder

GUESSED_SHARE = 0.88


class WeekdayTeam:
    """One clerk."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    async def solve(self, recorder: Recorder) -> None:
        """Solve one question: say something, use the tool, finish."""
        task = recorder.task
        day = task.question.rstrip("?").split()[-1]
        if random.Random(f"{self._seed}/{task.id}").random() < GUESSED_SHARE:
            recorder.say("clerk", "I guess.")
            recorder.finish("clerk", "Sunday")
            return
        recorder.say("clerk", "Look it up.")
        result = await recorder.use("clerk", "weekday", day)
        recorder.say("clerk", "Done.")
        recorder.finish("clerk", result.text)
