"""How the parts of a verdict make its score: the formula, and the punishment of responses that are too long."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

from afm.errors import ConfigError, suggestion
from afm.rewards.base import Part, Sample, Scorer

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
