"""What decides whether a trajectory is good enough to learn from: stages with a reason per dropped row."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from afm.agents import AgentSpec
from afm.rewards import Reward, Sample
from afm.trajectory import validate
from afm.trajectory.record import Record
from afm.trajectory.types import Segment


class Filter(Protocol):
    """One stage. It sees only rows that every earlier stage kept."""

    @property
    def name(self) -> str:
        """Names the stage in reasons and counts."""
        ...

    async def check(self, record: Record) -> Record:
        """The record, enriched or with ``kept=False`` and a reason that begins with ``name: ``."""
        ...


@dataclass(frozen=True)
class FormatFilter:
    """Keeps what the agent's declaration accepts: structure, transitions, authors."""

    spec: AgentSpec
    name: str = "format"

    async def check(self, record: Record) -> Record:
        """Validate the trajectory."""
        issues = validate(segments_of(record), self.spec)
        return dropped(record, f"{self.name}: {issues[0]}") if issues else record


@dataclass(frozen=True)
class QualityFilter:
    """Keeps what the reward scores at least ``min_score``; the verdict stays in the record either way."""

    spec: AgentSpec
    reward: Reward
    min_score: float = 1.0
    name: str = "quality"

    async def check(self, record: Record) -> Record:
        """Judge the trajectory. An abstaining reward drops it, since nobody vouches for it."""
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
        judged = record.model_copy(update={"verdict": verdict})
        if verdict.score is None:
            return dropped(judged, f"{self.name}: no verdict: {verdict.evidence}")
        if verdict.score < self.min_score:
            return dropped(judged, f"{self.name}: score {verdict.score:g}: {verdict.evidence}")
        return judged


@dataclass
class Funnel:
    """Counts of a filter run.

    Attributes:
        dropped: Rows dropped, by the stage's name (the part of the reason before the first colon).
    """

    seen: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def count(self, record: Record) -> None:
        """Add one row that has passed or left the filters."""
        self.seen += 1
        self.kept += record.kept
        if not record.kept:
            self.dropped[record.reason.partition(":")[0]] += 1


async def run_filters(
    records: Iterable[Record], filters: Sequence[Filter], *, parallel: int = 32
) -> AsyncIterator[Record]:
    """Stream every record through the filters, in order, ``parallel`` at a time; dropped ones come out too."""
    rows = iter(records)
    while batch := list(islice(rows, parallel)):
        for record in await asyncio.gather(*(_pass(record, filters) for record in batch)):
            yield record


def dropped(record: Record, reason: str) -> Record:
    """The same record, marked as not to be trained on."""
    return record.model_copy(update={"kept": False, "reason": reason})


def segments_of(record: Record) -> tuple[Segment, ...]:
    """The record's trajectory by author."""
    return tuple(Segment(segment.author, segment.text) for segment in record.segments)


async def _pass(record: Record, filters: Sequence[Filter]) -> Record:
    for stage in filters:
        if not record.kept:
            return record
        record = await stage.check(record)
    return record
