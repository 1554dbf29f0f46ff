"""When a request to a model's server is worth repeating, and how long to wait before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

ResultT = TypeVar("ResultT")

RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
LONGEST_PAUSE_S = 60.0
_jitter = wait_random_exponential(multiplier=0.25, max=20)


class TryAgainError(Exception):
    """A failure that may pass by itself.

    Attributes:
        wait_s: The server asked for this pause.
    """

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


async def persistently(attempts: int, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """The result of ``call``, which is repeated while it raises :class:`TryAgainError`.

    Pauses grow from a quarter of a second to 20 s at random, and add to what the server asked for.

    Raises:
        TryAgainError: The last of ``attempts`` calls failed, too.
    """
    retrying = AsyncRetrying(
        stop=stop_after_attempt(attempts),
        wait=_pause_s,
        retry=retry_if_exception_type(TryAgainError),
        reraise=True,
    )

    async def once() -> ResultT:  # tenacity awaits what it can see to be a coroutine function
        return await call()

    result: ResultT = await retrying(once)
    return result


def retry_after_s(response: httpx.Response) -> float:
    """The pause that ``Retry-After`` asks for, in seconds or as a date: 0 to ``LONGEST_PAUSE_S``."""
    told = response.headers.get("Retry-After", "0")
    try:
        wait_s = float(told)
    except ValueError:
        wait_s = _until(told)
    return min(LONGEST_PAUSE_S, wait_s) if wait_s > 0 else 0.0


def _until(date: str) -> float:
    try:
        moment = parsedate_to_datetime(date)
    except (ValueError, OverflowError):
        return 0.0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - datetime.now(UTC)).total_seconds()


def _pause_s(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    asked_s = error.wait_s if isinstance(error, TryAgainError) else 0.0
    return asked_s + _jitter(state)
