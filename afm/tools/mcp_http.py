"""The HTTP client for MCP servers at an address: no answer is held that is longer than agreed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2


class AnswerTooLargeError(httpx2.StreamError):
    """An answer is larger than agreed; the protocol's client makes it the failure of that one call."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


def bounded_client(headers: dict[str, str], max_bytes: int) -> httpx2.AsyncClient:
    """A client whose answers raise :class:`AnswerTooLargeError` when more than ``max_bytes`` of a body are read.

    A compressed body could grow after it was counted: none is asked for, and one that comes is refused. The
    length of a stream of events is the transport's to bound, event by event.
    """
    from mcp.shared._httpx_utils import create_mcp_http_client

    async def bind(response: httpx2.Response) -> None:
        events = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        coding = response.headers.get("content-encoding", "identity").strip().lower()
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Bounded(response.stream, None if events else max_bytes, coding)

    client = create_mcp_http_client(headers={**headers, "Accept-Encoding": "identity"})
    client.event_hooks["response"].append(bind)
    return client


class _Bounded(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, max_bytes: int | None, coding: str) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._coding = coding

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._coding != "identity":
            raise AnswerTooLargeError(f"the answer is compressed ({self._coding}), which was not asked for")
        received = 0
        async for piece in self._stream:
            received += len(piece)
            if self._max_bytes is not None and received > self._max_bytes:
                raise AnswerTooLargeError(f"the answer is larger than {self._max_bytes} bytes")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
