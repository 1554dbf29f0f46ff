"""Score mathematical answers with Math-Verify, in worker processes with a hard time limit."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from afm.errors import MissingExtraError, RewardError
from afm.rewards.base import Part
from afm.rewards.equality import is_copied, is_unevaluated, quick_verdict, readings
from afm.rewards.text_match import AnswerScorer
from afm.rewards.workers import WorkerCpuError, WorkerCrashError, WorkerKilledError, WorkerPool

_WORKER_MEMORY_BYTES = 2 << 30
_CLOCK = 12
"""Wall-clock seconds per CPU second. A worker that takes longer is starved or stopped."""


class MathVerify(AnswerScorer):
    """Scores 1 if the final answer equals a gold answer, else 0.

    :func:`afm.rewards.equality.quick_verdict` decides most pairs at once. Worker processes decide the rest. A pair that
    uses up its CPU time, or that crashes two workers in a row, is wrong unless the gold answer alone does the same. If the
    machine starves, stops or kills a worker, there is no score.

    Args:
        cpu_s: CPU seconds per pair. The wall-clock limit is twelve times as long.
        workers: Worker processes. By default the number of cores, at most 4.
    """

    def __init__(self, cpu_s: float = 5.0, workers: int | None = None) -> None:
        self._cpu_s = cpu_s
        self._workers = workers or min(4, len(os.sched_getaffinity(0)))
        self._pool: WorkerPool | None = None

    async def compare(
        self, accepted: tuple[str, ...], responses: tuple[str, ...], question: str = ""
    ) -> Part:
        """Score 1 if the answer equals one of ``accepted`` and is not copied from ``question``.

        Raises:
            MissingExtraError: Math-Verify is not installed, and a pair needs it.
        """
        answer = ", ".join(responses)
        shown = f"{answer[:200]!r}"
        pairs = [pair for gold in accepted for pair in readings(gold, answer, question)]
        verdicts = [(*pair, quick_verdict(*pair)) for pair in pairs]
        if any(verdict for *_, verdict in verdicts):
            return Part(1.0, f"{shown} equals the gold answer")
        problem = ""
        for gold, read, verdict in verdicts:
            if verdict is None and is_unevaluated(gold, read):
                problem = problem or "an expression that was not worked out"
            elif verdict is None:
                equal, note = await self._algebra(gold, read)
                if equal and is_copied(gold, read, question):
                    problem = problem or "copied from the question"
                elif equal:
                    return Part(1.0, f"{shown} equals {gold!r}")
                elif equal is None:
                    return Part(None, note)
                problem = problem or note
        return Part(0.0, f"{shown} is not {accepted[0][:200]!r}{problem and f' ({problem})'}")

    async def close(self) -> None:
        """End the worker processes."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    async def _algebra(self, gold: str, answer: str) -> tuple[bool | None, str]:
        """Return Math-Verify's verdict and a note. The verdict is ``None`` if its absence is not the response's fault."""
        problem: RewardError | None = None
        for _ in range(2):
            try:
                reply = await self._ask(gold, answer)
            except (WorkerCrashError, WorkerKilledError) as error:
                problem = error
                if isinstance(error, WorkerCpuError):
                    break
            except RewardError as error:
                return None, f"math verifier unavailable: {error}"
            else:
                return bool(reply.get("equal")), reply.get("error", "")
        if isinstance(problem, WorkerKilledError):
            return None, f"math verifier unavailable: {problem}"
        try:
            await self._ask(gold, gold)
        except RewardError as error:
            return None, f"the gold answer {gold[:80]!r} cannot be compared with itself: {error}"
        if isinstance(problem, WorkerCpuError):
            return False, f"not decided within {self._cpu_s:g} s of CPU time"
        return False, "the verifier crashed on it"

    async def _ask(self, gold: str, answer: str) -> dict[str, Any]:
        return await self._started().ask({"gold": gold, "answer": answer}, self._cpu_s * _CLOCK)

    def _started(self) -> WorkerPool:
        if self._pool is None:
            if find_spec("math_verify") is None:
                raise MissingExtraError("math_verify", "rewards")
            limits = (str(_WORKER_MEMORY_BYTES), str(self._cpu_s))
            self._pool = WorkerPool("afm.rewards.verifier", self._workers, limits)
        return self._pool
