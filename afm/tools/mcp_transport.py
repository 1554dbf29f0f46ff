"""Transports to MCP servers with a limit on the length of an answer: a program's standard streams, and HTTP.

The standard streams of the package ``mcp`` (2.3) collect a line of any length until it ends.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, TypeAlias

import anyio
import httpx2
from anyio.abc import ObjectReceiveStream, ObjectSendStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

if TYPE_CHECKING:
    from mcp.shared.message import SessionMessage


_LOG = logging.getLogger(__name__)
_FLUSH_S = 0.5
_EXIT_S = 2.0
_POLL_S = 0.01
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)

_Incoming: TypeAlias = "SessionMessage | Exception"
_Streams: TypeAlias = "tuple[ObjectReceiveStream[_Incoming], ObjectSendStream[SessionMessage]]"


@asynccontextmanager
async def program(
    command: Sequence[str], environment: dict[str, str], max_bytes: int
) -> AsyncIterator[_Streams]:
    """Start a server's program and exchange messages with it, one line of JSON each. Its errors go to our stderr.

    The connection ends with the program, or when it writes a line of more than ``max_bytes``. On exit, the program's input
    is closed, and after a short wait the program is killed with everything it started.

    Args:
        environment: The complete environment of the program.

    Raises:
        OSError: The program cannot be started.
    """
    process = await anyio.open_process(
        command,
        env=environment,
        stderr=sys.stderr,
        start_new_session=True,
    )
    # No await before the task group, because a cancellation in between would leave the program running.
    arrived, incoming = anyio.create_memory_object_stream["_Incoming"](0)
    outgoing, sent = anyio.create_memory_object_stream["SessionMessage"](0)
    flushed, silent = anyio.Event(), anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_read, process, arrived, max_bytes, silent)
        tasks.start_soon(_write, process, sent, arrived, flushed)
        try:
            yield incoming, outgoing
        finally:
            with anyio.CancelScope(shield=True):
                incoming.close()
                outgoing.close()
                with anyio.move_on_after(_FLUSH_S):
                    await flushed.wait()
                await _end(process, silent)
            tasks.cancel_scope.cancel()


async def _read(
    process: Process, arrived: ObjectSendStream[_Incoming], max_bytes: int, silent: anyio.Event
) -> None:
    assert process.stdout is not None
    with suppress(*_GONE, anyio.IncompleteRead):
        async with arrived:
            await _pass_on(BufferedByteReceiveStream(process.stdout), arrived, max_bytes)
    with suppress(*_GONE):
        async for _ in process.stdout:  # without a reader the program may block and never exit
            pass
    silent.set()


async def _pass_on(
    lines: BufferedByteReceiveStream, arrived: ObjectSendStream[_Incoming], max_bytes: int
) -> None:
    while True:
        try:
            line = await lines.receive_until(b"\n", max_bytes + 1)
        except anyio.DelimiterNotFound:
            _LOG.warning("an MCP server wrote a line of more than %d bytes; its connection ends", max_bytes)
            return
        await arrived.send(_message(line))


def _message(line: bytes) -> _Incoming:
    """Return the message of a line, or the error of an invalid line, which the session reports before it continues."""
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


async def _write(
    process: Process,
    sent: ObjectReceiveStream[SessionMessage],
    arrived: ObjectSendStream[_Incoming],
    flushed: anyio.Event,
) -> None:
    assert process.stdin is not None
    try:
        async with sent:
            async for each in sent:
                line = each.message.model_dump_json(by_alias=True, exclude_unset=True) + "\n"
                await process.stdin.send(line.encode("utf-8"))
    except _GONE:
        await arrived.aclose()  # current calls end now, even if the program continues to run
    finally:
        flushed.set()


async def _end(process: Process, silent: anyio.Event) -> None:
    from mcp.os.posix.utilities import terminate_posix_process_tree

    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(*_GONE):
        await process.stdin.aclose()
    if not await _exited(process):
        await terminate_posix_process_tree(process, _EXIT_S)
        await _exited(process)
    with anyio.move_on_after(_EXIT_S):
        await silent.wait()
    with suppress(*_GONE):
        await process.stdout.aclose()


async def _exited(process: Process) -> bool:
    """Return whether the program exits in time. ``process.wait()`` would also wait for all that inherited the pipes."""
    with anyio.move_on_after(_EXIT_S):
        while process.returncode is None:  # noqa: ASYNC110 - a process has no such event
            await anyio.sleep(_POLL_S)
    return process.returncode is not None


class AnswerTooLargeError(httpx2.StreamError):
    """An answer exceeds the limit. The protocol's client makes only that call fail."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


def bounded_client(headers: dict[str, str], max_bytes: int) -> httpx2.AsyncClient:
    """Return a client whose answers raise :class:`AnswerTooLargeError` once a body exceeds ``max_bytes``.

    A compressed body could exceed the limit after it is counted, so the client requests none and refuses one that
    arrives. In a stream of events, the transport limits each event.
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
            raise AnswerTooLargeError(f"the answer is compressed ({self._coding}), which was not requested")
        received = 0
        async for piece in self._stream:
            received += len(piece)
            if self._max_bytes is not None and received > self._max_bytes:
                raise AnswerTooLargeError(f"the answer is larger than {self._max_bytes} bytes")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
