"""Lightweight clients of a wiki server: HTTP/1.1 over plain sockets, with a persistent connection per client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any


def message(queries: Sequence[str], topk: int) -> bytes:
    """Return the bytes of one request."""
    body = json.dumps({"queries": list(queries), "topk": topk, "return_scores": True}).encode()
    head = f"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def answered(reader: asyncio.StreamReader) -> bytes:
    """Read the body of one response.

    Raises:
        RuntimeError: The status is not 200.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    body = await reader.readexactly(int(length.partition(b":")[2]))
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise RuntimeError(f"{head.decode()}{body.decode()}")
    return body


def post(port: int, queries: Sequence[str], topk: int) -> list[list[dict[str, Any]]]:
    """Return the results of one request."""

    async def once() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        writer.write(message(queries, topk))
        try:
            return await answered(reader)
        finally:
            writer.close()

    return list(json.loads(asyncio.run(once()))["result"])


def measure(port: int, queries: Iterator[str], clients: int, seconds: float) -> dict[str, float]:
    """Run a closed loop, in which each client sends its next query after the last answer; count failures."""
    return asyncio.run(_measure(port, queries, clients, seconds))


async def _measure(port: int, queries: Iterator[str], clients: int, seconds: float) -> dict[str, float]:
    times: list[float] = []
    failures = 0
    begin = time.perf_counter() + 0.2 + clients / 500
    end = begin + seconds

    async def client() -> None:
        nonlocal failures
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
        while (sent := time.perf_counter()) < end:
            writer.write(message([next(queries)], 3))
            try:
                await answered(reader)
            except (RuntimeError, OSError, EOFError):
                failures += 1
                return
            if sent >= begin:
                times.append(time.perf_counter() - sent)
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(client() for _ in range(clients)))
    spent = time.perf_counter() - begin
    times.sort()
    return {
        "queries_per_s": round(len(times) / spent, 1),
        "p50_ms": round(1000 * times[len(times) // 2], 2),
        "p99_ms": round(1000 * times[min(len(times) - 1, int(0.99 * len(times)))], 2),
        "failures": failures,
    }
