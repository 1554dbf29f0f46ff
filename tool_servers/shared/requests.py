"""Reading requests that may be too large, too slow, or given up by their sender."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

ResultT = TypeVar("ResultT")


class TooLargeError(Exception):
    """The body is larger than allowed."""


class GoneError(Exception):
    """The sender has closed the connection."""


def announced_bytes(request: Request, unknown: int) -> int:
    """The length that a request says its body has; ``unknown`` when it does not say."""
    told = request.headers.get("content-length", "")
    return int(told) if told.isdecimal() else unknown


async def bounded_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """The body of a request.

    Raises:
        TooLargeError: It is, or says that it is, larger than ``max_bytes``.
        TimeoutError: It did not arrive within ``seconds``.
        GoneError: The sender left in between.
    """
    if announced_bytes(request, 0) > max_bytes:
        raise TooLargeError(f"the request is longer than {max_bytes} bytes")
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise TooLargeError(f"the request is longer than {max_bytes} bytes")
    except ClientDisconnect:
        raise GoneError from None
    return bytes(body)


async def while_connected(request: Request, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of ``work``, which is cancelled when the sender closes the connection.

    Call it when the body has been read.

    Raises:
        GoneError: The sender left; the work has ended.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise GoneError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def refused(request: Request, error: Exception) -> Response:
    """``{"error"}`` for a path that there is not (404) or a method that it does not take (405)."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return JSONResponse(
        {"error": message, "kind": "request"}, status_code=error.status_code, headers=error.headers
    )
