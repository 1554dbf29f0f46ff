"""Is the answer right?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from afm.agents import AgentSpec
from afm.distill.filters.base import FilterSettings, dropped, segments_of
from afm.rewards import Reward, Sample
from afm.trajectory.record import Record, Verdict


class QualitySettings(FilterSettings):
    """How answers are judged.

    Attributes:
        min_score: Lowest score that is kept.
        reward: A reward YAML; by default the scorer of each row's data source.
        recorded: Take the verdict that a row carries already, and judge only rows without one.
    """

    min_score: float = Field(default=1.0, allow_inf_nan=False)
    reward: Path | None = None
    recorded: bool = Field(default=False)


@dataclass(frozen=True)
class QualityFilter:
    """Keeps what the reward scores at least ``min_score``; the verdict stays in the record either way.

    The verdict's seconds are not kept: filtering the same rows again gives the same bytes.
    """

    spec: AgentSpec
    reward: Reward
    min_score: float = 1.0
    recorded: bool = False
    name: str = "quality"

    def apply(self, record: Record) -> Record | None:
        """See :meth:`check`; ``None`` for a record that must be judged."""
        verdict = record.verdict
        if verdict is None or verdict.score is None or not self.recorded:
            return None
        return self._decided(record, verdict)

    async def check(self, record: Record) -> Record:
        """Judge the trajectory. An abstaining reward drops it, since nobody vouches for it."""
        found = self.apply(record)
        if found is not None:
            return found
        verdict = await self._judge(record)
        return self._decided(record.model_copy(update={"verdict": verdict}), verdict)

    def _decided(self, judged: Record, verdict: Verdict) -> Record:
        if verdict.score is None:
            return dropped(judged, f"{self.name}: no verdict: {verdict.evidence}")
        if not verdict.score >= self.min_score:  # nor is what is no number
            return dropped(judged, f"{self.name}: score {verdict.score:g}: {verdict.evidence}")
        return judged

    async def close(self) -> None:
        """Free the reward's worker processes."""
        await self.reward.close()

    async def _judge(self, record: Record) -> Verdict:
        verdict = await self.reward.score(
            Sample(
                spec=self.spec,
                data_source=record.data_source,
                question=record.question,
                segments=segments_of(record),
                ground_truth=record.ground_truth,
                extra_info=record.provenance.get("extra_info", {}),
            )
        )
        return verdict.model_copy(update={"seconds": 0.0})
