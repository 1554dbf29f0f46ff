"""Pace of requests: no faster than a server allows, with retries after temporary failures."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

from afm.errors import ConfigError

ResultT = TypeVar("ResultT")

RETRIED_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
LONGEST_REQUESTED_S = 60.0
"""Maximum pause in seconds that a server's ``Retry-After`` can request."""
_FIRST_PAUSE_S = 0.25
_WINDOW_S = 60.0


class TryAgainError(Exception):
    """A failure after which a retry may succeed.

    Attributes:
        wait_s: Pause in seconds that the server requested.
    """

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


async def persistently(
    attempts: int, call: Callable[[], Awaitable[ResultT]], *, longest_s: float = 20.0
) -> ResultT:
    """Return the result of ``call``. While it raises :class:`TryAgainError`, repeat it after :func:`pause_s`.

    Raises:
        TryAgainError: All ``attempts`` failed.
    """
    for attempt in range(attempts - 1):
        try:
            return await call()
        except TryAgainError as error:
            wait_s = error.wait_s
        await asyncio.sleep(pause_s(attempt, wait_s, longest_s=longest_s))
    return await call()


def pause_s(attempt: int, requested_s: float = 0.0, *, longest_s: float = 20.0) -> float:
    """Return the requested pause plus exponential backoff, in seconds. Jitter keeps clients from returning together.

    Args:
        attempt: Number of failed attempts before the last one.
        longest_s: Maximum of the backoff, without the requested pause.
    """
    backoff_s = min(longest_s, _FIRST_PAUSE_S * 2 ** min(attempt, 10))
    return requested_s + random.uniform(backoff_s / 2, backoff_s)


def retry_after_s(headers: Mapping[str, str], *, longest_s: float = LONGEST_REQUESTED_S) -> float:
    """Return the pause of ``Retry-After`` (seconds or a date), from 0 to ``longest_s`` seconds."""
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


@dataclass(slots=True)
class Departure:
    """One sent request.

    Attributes:
        at_s: Time of departure on the pace's clock.
        tokens: Expected tokens, later the used tokens.
    """

    at_s: float
    tokens: int


class Pace:
    """Limits requests and their tokens per minute.

    Args:
        requests: Maximum number in any minute. ``None`` means no limit.
        tokens: Maximum number in any minute, prompts and replies together. ``None`` means no limit.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        requests: int | None = None,
        tokens: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = requests
        self._tokens = tokens
        self._clock = clock
        self._sent: deque[Departure] = deque()
        self._used = 0
        self._closed_until_s = 0.0

    async def departure(self, tokens: int) -> Departure:
        """Wait until a request of about ``tokens`` tokens may be sent, and count it.

        Raises:
            ConfigError: The request exceeds the limit of a whole minute.
        """
        while True:
            wait_s = self.delay_s(tokens)
            if wait_s <= 0:
                return self.depart(tokens)
            await asyncio.sleep(wait_s)

    def delay_s(self, tokens: int) -> float:
        """Return the minimum wait in seconds for a request of ``tokens`` tokens. 0 if it may be sent now.

        Raises:
            ConfigError: The request exceeds the limit of a whole minute.
        """
        if self._tokens is not None and tokens > self._tokens:
            raise ConfigError(
                f"a request of about {tokens} tokens never fits into {self._tokens} tokens per minute; "
                "raise tokens_per_minute, or lower max_tokens or the limits of what is shown"
            )
        now = self._clock()
        while self._sent and self._sent[0].at_s <= now - _WINDOW_S:
            self._used -= self._sent.popleft().tokens
        delay_s = max(0.0, self._closed_until_s - now)
        if self._requests is not None and len(self._sent) >= self._requests:
            delay_s = max(delay_s, self._sent[len(self._sent) - self._requests].at_s + _WINDOW_S - now)
        if self._tokens is not None:
            delay_s = max(delay_s, self._tokens_free_s(self._used + tokens - self._tokens, now))
        return delay_s

    def depart(self, tokens: int) -> Departure:
        """Count a request that is sent now."""
        sent = Departure(self._clock(), tokens)
        self._sent.append(sent)
        self._used += tokens
        return sent

    def settle(self, sent: Departure, tokens: int) -> None:
        """Replace the expected tokens by the used tokens."""
        if self._sent and sent.at_s >= self._sent[0].at_s:
            self._used += tokens - sent.tokens
        sent.tokens = tokens

    def close_for(self, seconds: float) -> None:
        """Hold all requests for ``seconds``, because the server requested a pause."""
        self._closed_until_s = max(self._closed_until_s, self._clock() + seconds)

    def _tokens_free_s(self, missing: int, now: float) -> float:
        """Return the seconds until departures with ``missing`` tokens leave the window."""
        for sent in self._sent:
            if missing <= 0:
                break
            missing -= sent.tokens
            if missing <= 0:
                return sent.at_s + _WINDOW_S - now
        return 0.0
