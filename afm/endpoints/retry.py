"""Which failed requests are worth repeating, and how long to wait before."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

ResultT = TypeVar("ResultT")

RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
LONGEST_REQUESTED_S = 60.0
"""A server's ``Retry-After`` counts up to here."""
_FIRST_PAUSE_S = 0.25


class TryAgainError(Exception):
    """A failure that may pass by itself.

    Attributes:
        wait_s: The pause that the server asked for.
    """

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


async def persistently(attempts: int, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
    """The result of ``call``, which is repeated after a :func:`pause_s` while it raises :class:`TryAgainError`.

    Raises:
        TryAgainError: The last of ``attempts`` calls failed, too.
    """
    retrying = AsyncRetrying(
        stop=stop_after_attempt(attempts),
        wait=_pause_after,
        retry=retry_if_exception_type(TryAgainError),
        reraise=True,
    )

    async def attempt() -> ResultT:  # tenacity awaits what it can see to be a coroutine function
        return await call()

    result: ResultT = await retrying(attempt)
    return result


def pause_s(attempt: int, requested_s: float = 0.0, *, longest_s: float = 20.0) -> float:
    """What the server asked for plus exponential backoff, with jitter so that clients do not return together.

    Args:
        attempt: Failed attempts before the last one.
        longest_s: Bound of the backoff alone.
    """
    backoff_s = min(longest_s, _FIRST_PAUSE_S * 2 ** min(attempt, 10))
    return requested_s + random.uniform(backoff_s / 2, backoff_s)


def retry_after_s(headers: Mapping[str, str], *, longest_s: float = LONGEST_REQUESTED_S) -> float:
    """The pause that ``Retry-After`` asks for, in seconds or as a date: 0 to ``longest_s``."""
    value = headers.get("Retry-After", "0")
    try:
        wait_s = float(value)
    except ValueError:
        wait_s = _seconds_until(value)
    return min(longest_s, wait_s) if wait_s > 0 else 0.0


def _seconds_until(date: str) -> float:
    try:
        moment = parsedate_to_datetime(date)
    except (ValueError, OverflowError):
        return 0.0
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - datetime.now(UTC)).total_seconds()


def _pause_after(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    requested_s = error.wait_s if isinstance(error, TryAgainError) else 0.0
    return pause_s(state.attempt_number - 1, requested_s)
