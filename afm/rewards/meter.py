"""How many tokens the judge was sent and wrote while something was judged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Meter:
    """A count of tokens, of prompts and replies together."""

    tokens: int = 0


_RUNNING: ContextVar[Meter | None] = ContextVar("judge_meter", default=None)


@contextmanager
def judge_meter() -> Iterator[Meter]:
    """Count what judges are asked inside, in tasks that begin there too.

    A request that several wait for counts where it began; a cached verdict counts nowhere.
    """
    meter = Meter()
    before = _RUNNING.set(meter)
    try:
        yield meter
    finally:
        _RUNNING.reset(before)


def charge(tokens: int) -> None:
    """Add to the count that is running, if one is."""
    meter = _RUNNING.get()
    if meter is not None:
        meter.tokens += tokens
