"""What a reward is: a sample to judge, the parts of a verdict, their scorers, and many samples at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from afm.agents import AgentSpec
from afm.trajectory.record import Verdict
from afm.trajectory.tags import Segment

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class AskedQuestion(Protocol):
    """A question with its gold answer: a task or a record."""

    @property
    def data_source(self) -> str:
        """Chooses the reward."""
        ...

    @property
    def question(self) -> str:
        """What was asked."""
        ...

    @property
    def ground_truth(self) -> Any:
        """What the reward compares with."""
        ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to judge.

    Attributes:
        segments: The response by author, so that text in an observation never counts as the agent's.
        ground_truth: As in the row: str, list of str, {"target": [..]} or a JSON string of that.
        agent_tokens: Sampled tokens; ``None`` when unknown.
        response_tokens: Sampled and observed tokens, those of an observation that did not fit included; ``None`` when unknown.
        answer_alone: Whether the form counts as kept: a team's words are brought into the agent's form by us.
    """

    spec: AgentSpec
    data_source: str
    question: str
    segments: tuple[Segment, ...]
    ground_truth: Any
    agent_tokens: int | None = None
    response_tokens: int | None = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    answer_alone: bool = False

    @classmethod
    def of(cls, spec: AgentSpec, asked: AskedQuestion, segments: tuple[Segment, ...], **more: Any) -> Sample:
        """A response to a task, or the one that a record holds; ``more`` are the other fields."""
        return cls(spec, asked.data_source, asked.question, segments, asked.ground_truth, **more)


class Reward(Protocol):
    """Judges one response. Infrastructure failure is an abstaining verdict, never a score."""

    async def score(self, sample: Sample) -> Verdict:
        """Judge ``sample``; does not raise for anything the response contains."""
        ...

    async def close(self) -> None:
        """Free worker processes."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """A number with its reason; ``score`` is ``None`` when the scorer could not tell (it abstains)."""

    score: float | None
    evidence: str = ""


class Scorer(Protocol):
    """Judges one aspect of a response: its answer, its format, its length."""

    async def judge(self, sample: Sample) -> Part:
        """The part for ``sample``; does not raise for anything the response contains."""
        ...

    async def close(self) -> None:
        """Free worker processes, if there are any."""
        return  # most scorers hold none


@runtime_checkable
class FormScorer(Protocol):
    """A scorer whose replies have a format of their own, which counts in place of the agent's."""

    async def form(self, sample: Sample) -> Part:
        """1 when the reply has it, else 0."""
        ...


async def score_many(reward: Reward, samples: Iterable[Sample], *, parallel: int = 64) -> list[Verdict]:
    """Verdicts in the order of ``samples``, up to ``parallel`` of them worked on at the same time.

    Raises:
        AfmError: What the first failing sample raised, e.g. no scorer for its data source; the others are cancelled.
    """
    async with aclosing(in_order(reward.score, samples, parallel)) as verdicts:
        return [verdict async for verdict in verdicts]


async def in_order(
    work: Callable[[ItemT], Coroutine[Any, Any, ResultT]],
    items: Iterable[ItemT],
    parallel: int,
    *,
    ahead: int | None = None,
) -> AsyncGenerator[ResultT]:
    """The result of ``work`` for each of ``items`` in their order, up to ``parallel`` of them at the same time.

    Work under way is cancelled when the caller stops.

    Args:
        ahead: How many items are taken before the first result is out, for items that are read as they are needed. A slow
            one then holds up those further behind it. All when ``None``.
    """
    gate = asyncio.Semaphore(parallel)

    async def admitted(item: ItemT) -> ResultT:
        async with gate:
            return await work(item)

    waiting: deque[asyncio.Task[ResultT]] = deque()
    try:
        for item in items:
            waiting.append(asyncio.create_task(admitted(item)))
            if ahead is not None and len(waiting) >= ahead:
                yield await waiting[0]
                waiting.popleft()
        while waiting:
            yield await waiting[0]
            waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
