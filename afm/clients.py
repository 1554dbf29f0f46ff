"""HTTP clients for many requests at a time.

httpx looks at every connection of a client before and after each request, so that a request of one client with 64 connections takes
several times as long as one of a client with eight (``benchmarks/bench_eval.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import httpx

_EACH = 8


class HttpClients:
    """Clients with a few connections each; a request takes the least busy one.

    Args:
        connections: Kept open between requests, all clients together.
        bounded: Whether there may be no more; a request beyond waits in its client.
        options: Of each ``httpx.AsyncClient``.
    """

    def __init__(self, connections: int, *, bounded: bool = True, **options: Any) -> None:
        # As even as can be: the least busy client then always has room while fewer than `connections` are on their way.
        number = -(-connections // _EACH)
        shares = [(connections + number - 1 - place) // number for place in range(number)]
        certificates = httpx.create_ssl_context(trust_env=options.get("trust_env", True))
        self._clients = [
            httpx.AsyncClient(
                limits=httpx.Limits(
                    max_connections=share if bounded else None, max_keepalive_connections=share
                ),
                verify=certificates,
                **options,
            )
            for share in shares
        ]
        self._in_flight = [0] * len(shares)

    @contextmanager
    def one(self) -> Iterator[httpx.AsyncClient]:
        """The client of one request; the first of those that are equally busy, so that few connections serve few requests."""
        number = self._in_flight.index(min(self._in_flight))
        self._in_flight[number] += 1
        try:
            yield self._clients[number]
        finally:
            self._in_flight[number] -= 1

    async def aclose(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(client.aclose() for client in self._clients))


def forget_closed(by_loop: MutableMapping[asyncio.AbstractEventLoop, Any]) -> None:
    """Let go of what belonged to event loops that have ended: connections hold their loop, so weak keys alone keep both."""
    for loop in [one for one in by_loop if one.is_closed()]:
        del by_loop[loop]
