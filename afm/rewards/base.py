"""What a reward is: a sample to judge, the parts of a verdict, their scorers, and the formula that makes the score."""

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


class ResponseRow(BaseModel):
    """A line of a file of responses to score; further keys are left alone."""

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


LARGEST_PENALTY = 1.0

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., float]] = {"min": min, "max": max}
_LARGEST = 1_000_000  # whatever is made of such numbers stays finite
CORRECT, FORMAT, OVERLONG = "correct", "format", "overlong"
"""The parts of a verdict that a formula can name."""
DEFAULT_FORMULA = f"{CORRECT} * {FORMAT}"
_ALLOWED = f"numbers up to {_LARGEST}, names, + - * ( ), min() and max()"


class Formula:
    """An expression such as ``correct * format + overlong``.

    Only numbers, part names, ``+ - *``, brackets, ``min`` and ``max`` are understood; nothing is evaluated as
    Python.

    Args:
        text: The expression.
        known: Names it may use.

    Raises:
        ConfigError: It contains anything else.
    """

    def __init__(self, text: str, known: Iterable[str]) -> None:
        self.text = text
        self._known = tuple(known)
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ConfigError(f"formula {text!r} is no expression; expected {_ALLOWED}") from None
        self._body = tree.body
        self.names = frozenset(self._check(self._body))

    def __call__(self, parts: Mapping[str, float]) -> float:
        """The value of the formula; ``parts`` holds at least :attr:`names`."""
        return float(_value(self._body, parts))

    def _check(self, node: ast.expr) -> list[str]:
        """Names used below ``node``."""
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
    """0 up to the buffer, then linearly down to -1 at the limit and beyond.

    Soft overlong punishment of DAPO (arXiv 2503.14476, equation 13): the length is that of the whole response, observations
    included, and one that did not fit any more. So a response that observations filled is punished like any other.

    Args:
        max_tokens: The length at which the penalty reaches -1.
        buffer_tokens: How many tokens before that it begins.
    """

    def __init__(self, max_tokens: int, buffer_tokens: int, count: CountedTokens = CountedTokens.ALL) -> None:
        self._max = max_tokens
        self._buffer = buffer_tokens
        self._count = count

    async def judge(self, sample: Sample) -> Part:
        """The penalty for the response's length; abstains when the length is unknown."""
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
