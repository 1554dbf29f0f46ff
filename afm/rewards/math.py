"""Correctness of mathematical answers, by Math-Verify in worker processes with a hard time limit."""

from __future__ import annotations

import os
from importlib.util import find_spec

from afm.errors import DataError, MissingExtraError, RewardError
from afm.rewards.base import Sample
from afm.rewards.copied import is_copied
from afm.rewards.equality import is_unevaluated, quick_verdict
from afm.rewards.gold import gold_answers
from afm.rewards.part import Part
from afm.rewards.workers import WorkerCrashError, WorkerPool, WorkerTimeoutError
from afm.trajectory import answers

_WORKER_MEMORY_BYTES = 4 << 30


class MathVerify:
    """1 when the final answer equals a gold answer, else 0.

    Most pairs are decided at once (:func:`afm.rewards.equality.quick_verdict`); the rest go to worker
    processes, which start with the first such pair. A pair that takes longer than its limit, or that
    crashes two workers in a row, counts as wrong: gold answers are harmless, so the response is to blame.

    Args:
        timeout_s: Wall-clock limit of one pair; the worker is killed and replaced.
        workers: Worker processes; the number of cores, at most 4, when ``None``.
    """

    def __init__(self, timeout_s: float = 5.0, workers: int | None = None) -> None:
        self._timeout_s = timeout_s
        self._workers = workers or min(4, len(os.sched_getaffinity(0)))
        self._pool: WorkerPool | None = None

    async def judge(self, sample: Sample) -> Part:
        """Compare the agent's final answer with the gold answers.

        Raises:
            MissingExtraError: Math-Verify is not installed, and a pair needs it.
        """
        try:
            accepted = gold_answers(sample.ground_truth)
        except DataError as error:
            return Part(None, error.message)
        given = answers(sample.segments, sample.spec)
        if not given:
            return Part(0.0, "the response has no final answer")
        return await self.compare(accepted, ", ".join(given), sample.question)

    async def compare(self, accepted: tuple[str, ...], answer: str, question: str = "") -> Part:
        """1 when ``answer`` equals one of ``accepted`` and was not copied from ``question``."""
        shown = f"{answer[:200]!r}"
        verdicts = [(gold, quick_verdict(gold, answer)) for gold in accepted]
        if any(verdict for _, verdict in verdicts):
            return Part(1.0, f"{shown} equals the gold answer")
        problem = ""
        for gold, verdict in verdicts:
            if verdict is None and is_unevaluated(gold, answer):
                problem = problem or "an expression that was not worked out"
            elif verdict is None:
                equal, note = await self._algebra(gold, answer)
                if equal and is_copied(gold, answer, question):
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
        """Math-Verify's verdict and a note; ``None`` when no worker could be had."""
        pool = self._started()
        for _ in range(2):
            try:
                reply = await pool.ask({"gold": gold, "answer": answer}, self._timeout_s)
            except WorkerTimeoutError:
                return False, f"not decided within {self._timeout_s:g} s"
            except WorkerCrashError:
                continue
            except RewardError as error:
                return None, f"math verifier unavailable: {error}"
            return bool(reply.get("equal")), reply.get("error", "")
        return False, "the verifier crashed on it"

    def _started(self) -> WorkerPool:
        if self._pool is None:
            if find_spec("math_verify") is None:
                raise MissingExtraError("math_verify", "rewards")
            self._pool = WorkerPool("afm.rewards.verifier", self._workers, (str(_WORKER_MEMORY_BYTES),))
        return self._pool
