"""Rewards: the sample to judge, the parts of a verdict, their scorers, and the formula that combines them."""

from __future__ import annotations

import ast
import asyncio
import operator
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict

from afm.agents import AgentSpec
from afm.errors import ConfigError, suggestion
from afm.trajectory.record import Verdict
from afm.trajectory.tags import Segment

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class AskedQuestion(Protocol):
    """A question with its gold answer: a task or a record."""

    @property
    def data_source(self) -> str:
        """The data source, which chooses the reward."""
        ...

    @property
    def question(self) -> str:
        """The question."""
        ...

    @property
    def ground_truth(self) -> Any:
        """The gold answer."""
        ...


class ResponseRow(BaseModel):
    """One line of a file of responses to score. Other keys are ignored."""

    model_config = ConfigDict(strict=True)

    data_source: str
    response: str
    ground_truth: Any
    question: str | None = None
    agent: str | None = None
    agent_tokens: int | None = None
    response_tokens: int | None = None
    extra_info: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to judge.

    Attributes:
        segments: The response by author, so that text of an observation never counts as the agent's.
        ground_truth: As in the row: a string, a list of strings, {"target": [..]}, or JSON of these.
        agent_tokens: Sampled tokens; ``None`` if unknown.
        response_tokens: Sampled and observed tokens, including an observation that did not fit; ``None`` if unknown.
        answer_alone: Whether only the answer is judged, because the framework itself wrote the agent's format around it.
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
        """Make a sample of a task or record and a response. ``more`` sets the other fields."""
        return cls(spec, asked.data_source, asked.question, segments, asked.ground_truth, **more)


class Reward(Protocol):
    """Judges one response. If infrastructure fails, the verdict abstains and has no score."""

    async def score(self, sample: Sample) -> Verdict:
        """Judge ``sample``. No content of the response raises an error."""
        ...

    async def close(self) -> None:
        """Free worker processes."""
        ...


@dataclass(frozen=True, slots=True)
class Part:
    """A number with its reason. A ``score`` of ``None`` means that the scorer abstains."""

    score: float | None
    evidence: str = ""


class Scorer(Protocol):
    """Judges one aspect of a response: its answer, its format, its length."""

    async def judge(self, sample: Sample) -> Part:
        """Score ``sample``. No content of the response raises an error."""
        ...

    async def close(self) -> None:
        """Free worker processes, if any."""
        return  # most scorers have none


@runtime_checkable
class FormScorer(Protocol):
    """A scorer whose replies have their own format, which replaces the agent's in the verdict."""

    async def form(self, sample: Sample) -> Part:
        """Return 1 if the reply has that format, else 0."""
        ...


async def score_many(reward: Reward, samples: Iterable[Sample], *, parallel: int = 64) -> list[Verdict]:
    """Return the verdicts in the order of ``samples``, judging up to ``parallel`` at the same time.

    Raises:
        AfmError: The error of the first sample that fails, for example no scorer for its data source. The others are
            cancelled.
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
    """Yield the result of ``work`` for each item in order, working on up to ``parallel`` items at the same time.

    Running work is cancelled when the caller stops.

    Args:
        ahead: Number of items to take before the first result is ready, for items that are read on demand. A slow item
            then delays those behind it. ``None`` takes all.
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


LARGEST_PENALTY = 1.0

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max}
_LARGEST = 1_000_000  # usual formulas of such numbers stay finite
CORRECT, FORMAT, OVERLONG = "correct", "format", "overlong"
"""Parts of a verdict that a formula can name."""
DEFAULT_FORMULA = f"{CORRECT} * {FORMAT}"
_ALLOWED = f"numbers up to {_LARGEST}, names, + - * ( ), min() and max()"


class Formula:
    """An expression such as ``correct * format + overlong``.

    It consists of numbers, part names, ``+ - *``, brackets, ``min`` and ``max``. Nothing is evaluated as Python.

    Args:
        text: The expression.
        known: Names that it may use.

    Raises:
        ConfigError: It contains anything else.
    """

    def __init__(self, text: str, known: Iterable[str]) -> None:
        self.text = text
        self._known = tuple(known)
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ConfigError(f"formula {text!r} is not an expression; expected {_ALLOWED}") from None
        self._body = tree.body
        self.names = frozenset(self._check(self._body))

    def __call__(self, parts: Mapping[str, float]) -> float:
        """Return the value of the formula. ``parts`` holds at least :attr:`names`."""
        return float(_value(self._body, parts))

    def _check(self, node: ast.expr) -> list[str]:
        """Return the names used in ``node``."""
        match node:
            case ast.Constant(value=bool()):
                pass
            case ast.Constant(value=int() | float() as value) if value <= _LARGEST:
                return []
            case ast.Name(id=name):
                if name not in self._known:
                    raise ConfigError(
                        f"formula {self.text!r}: unknown name {name!r}, {suggestion(name, self._known)}"
                    )
                return [name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return self._check(left) + self._check(right)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                return self._check(operand)
            case ast.Call(func=ast.Name(id=name), args=[_, _, *_] as args, keywords=[]) if name in _FUNCTIONS:
                return [name for argument in args for name in self._check(argument)]
        shown = ast.unparse(node)
        raise ConfigError(f"formula {self.text!r}: {shown!r} is not allowed; expected {_ALLOWED}")


def _value(node: ast.expr, parts: Mapping[str, float]) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name):
            return parts[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_value(left, parts), _value(right, parts))
        case ast.UnaryOp(op=op, operand=operand):
            return _UNARY[type(op)](_value(operand, parts))
        case ast.Call(func=ast.Name(id=name), args=args):
            return _FUNCTIONS[name](*(_value(argument, parts) for argument in args))
    raise AssertionError(f"unchecked node {node!r}")


class CountedTokens(StrEnum):
    """Whose tokens count towards the length."""

    AGENT = "agent"
    """Sampled tokens only."""
    ALL = "all"
    """Sampled tokens and observations."""


class OverlongPenalty(Scorer):
    """A penalty of 0 up to the buffer, falling linearly to -1 at the limit and beyond.

    This is DAPO's soft overlong punishment (arXiv 2503.14476, equation 13). The length is that of the whole response with
    its observations, including one that did not fit. A response that observations filled is punished like any other.

    Args:
        max_tokens: Length at which the penalty reaches -1.
        buffer_tokens: Number of tokens before that length at which the penalty begins.
    """

    def __init__(self, max_tokens: int, buffer_tokens: int, count: CountedTokens = CountedTokens.ALL) -> None:
        self._max = max_tokens
        self._buffer = buffer_tokens
        self._count = count

    async def judge(self, sample: Sample) -> Part:
        """Return the penalty for the response's length. Abstains if the length is unknown."""
        agent = self._count is CountedTokens.AGENT
        length = sample.agent_tokens if agent else sample.response_tokens
        if length is None:
            return Part(None, f"overlong: the number of {'agent' if agent else 'response'} tokens is unknown")
        over = length - (self._max - self._buffer)
        if over <= 0:
            return Part(0.0)
        return Part(
            -LARGEST_PENALTY * min(1.0, over / self._buffer), f"overlong: {length} tokens of {self._max}"
        )
