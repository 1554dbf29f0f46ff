"""One call through the gateway: to the endpoint, back to the client piece by piece, and into the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from afm.distill.model_calls import CallLog, Label, ModelCall, Usage
from afm.endpoints.connections import HttpClients
from tool_servers.gateway.answers import Answer, EventStream, whole_answer
from tool_servers.gateway.settings import GatewaySettings, UpstreamRoute
from tool_servers.shared.endpoint import Admission, BusyError, GoneError, RefusalError, while_connected

_INSTEAD = b"[key]"


class Blackout:
    """Removes a key from data that arrives in pieces. Holds back only bytes that may be the beginning of the key.

    Args:
        key: Key to remove; if ``None`` or empty, all data passes unchanged.
    """

    def __init__(self, key: str | None) -> None:
        self._key = (key or "").encode()
        self._rest = b""

    def whole(self, content: bytes) -> bytes:
        """Return ``content`` without the key."""
        return content.replace(self._key, _INSTEAD) if self._key else content

    def feed(self, piece: bytes) -> bytes:
        """Add a piece; return the bytes that may pass now."""
        content = self.whole(self._rest + piece)
        longest = min(len(self._key) - 1, len(content))
        held = next((size for size in range(longest, 0, -1) if content.endswith(self._key[:size])), 0)
        passed, self._rest = content[: len(content) - held], content[len(content) - held :]
        return passed

    def end(self) -> bytes:
        """Return the bytes that were held back and turned out not to be the key."""
        rest, self._rest = self._rest, b""
        return rest


_PASSED = ("content-type", "retry-after", "retry-after-ms", "x-should-retry", "x-request-id")
_PASSED_BEGINNINGS = ("x-ratelimit-", "openai-")
_ERROR_CHARS = 2_000
_ANSWER_BYTES = 1 << 20
"""Disk space that the log reserves for one answer, which is written twice: as text, and as received."""
_LABEL_BYTES = 16 << 10
_FULL_RETRY_S = "30"
_NO_ENDPOINT = "the endpoint behind the gateway"


def error_body(refusal: RefusalError) -> dict[str, Any]:
    """Return the body of an error of the gateway itself, in the form that OpenAI's clients expect."""
    message = f"afm gateway: {refusal}"
    return {"error": {"message": message, "type": "gateway_error", "code": refusal.kind}}


def error_response(
    status: int, code: str, message: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Return an error of the gateway itself as a response."""
    return JSONResponse(error_body(RefusalError(status, code, message)), status_code=status, headers=headers)


class UnloggedError(Exception):
    """The log cannot record a call."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the log cannot be written ({error.strerror or type(error).__name__})")


@contextmanager
def room_for(log: CallLog, request_bytes: int) -> Iterator[None]:
    """Reserve space in the log for a call with a request of this size.

    Raises:
        UnloggedError: The disk has no space.
    """
    with ExitStack() as kept:
        try:
            kept.enter_context(log.reserved(request_bytes + _ANSWER_BYTES + _LABEL_BYTES))
        except OSError as error:
            raise UnloggedError(error) from error
        yield


@dataclass(frozen=True, slots=True)
class GatewayCall:
    """A request that the gateway passes on.

    Attributes:
        path: ``chat/completions`` or ``completions``.
        content: Body for the endpoint.
        body: The parsed body; empty if it is not a JSON object.
        hide_usage: Whether to hide the event with the token counts, because the client did not ask for it.
    """

    path: str
    content: bytes
    body: dict[str, Any]
    hide_usage: bool

    @property
    def model(self) -> str:
        """The requested model."""
        return str(self.body.get("model") or "")


@dataclass(frozen=True, slots=True)
class Desk:
    """What all calls share.

    Attributes:
        count: Called for each call with ``ok`` or the kind of failure.
    """

    settings: GatewaySettings
    clients: HttpClients
    log: CallLog
    admission: Admission
    count: Callable[[str], None]


class Exchange(Response):
    """A response that performs the whole exchange. It logs the call before the client can see its end."""

    def __init__(self, desk: Desk, route: UpstreamRoute, label: Label, call: GatewayCall) -> None:
        super().__init__()
        self._desk, self._route, self._label, self._call = desk, route, label, call
        self._blackout = Blackout(route.key)
        self._began = time.monotonic()
        self._first_s = 0.0
        self._status = 0
        self._answer = Answer()
        self._asking = self._started = self._logged = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Perform the exchange; close the connection to the endpoint if the client leaves."""
        with suppress(GoneError):
            await while_connected(receive, self._admitted(scope, receive, send))

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._desk.admission.place():
                with room_for(self._desk.log, len(self._call.content)):
                    self._asking = True
                    answer = await self._exchanged(send)
        except UnloggedError as error:
            answer = self._unlogged(str(error))
        except BusyError as error:
            self._desk.count("busy")
            answer = JSONResponse(error_body(error), error.status, error.headers)
        except asyncio.CancelledError:
            with suppress(UnloggedError):
                self._record("gone")
            raise
        if answer is not None:
            await answer(scope, receive, send)

    def _unlogged(self, message: str) -> JSONResponse | None:
        """Return the answer to a call that cannot be logged, or ``None`` to cut off a stream that has begun."""
        self._desk.count("log")
        if not self._asking:
            advice = "the endpoint was not asked; free space on the log's disk"
            return error_response(503, "log", f"{message}; {advice}", {"Retry-After": _FULL_RETRY_S})
        advice = "the endpoint has answered, and its answer is lost; asking again costs again"
        return (
            None
            if self._started
            else error_response(507, "log", f"{message}; {advice}", {"x-should-retry": "false"})
        )

    async def _exchanged(self, send: Send) -> JSONResponse | None:
        """Pass on the endpoint's answer; if it sent none, return an error of the gateway."""
        with self._desk.clients.least_busy() as client:
            return await self._asked(client, send)

    async def _asked(self, client: httpx.AsyncClient, send: Send) -> JSONResponse | None:
        try:
            async with asyncio.timeout(self._desk.settings.answer_s):
                response = await client.send(self._request(client), stream=True)
        except (TimeoutError, httpx.TimeoutException) as error:
            late = not isinstance(error, httpx.ConnectTimeout)
            message = f"{_NO_ENDPOINT} {'did not answer in time' if late else 'cannot be reached'}"
            return self._failed(504, "timeout", message)
        except httpx.ConnectError:
            return self._failed(502, "connect", f"{_NO_ENDPOINT} cannot be reached")
        except httpx.TransportError as error:
            message = f"{_NO_ENDPOINT} closed the connection ({type(error).__name__})"
            return self._failed(502, "cut", message)
        self._first_s = self._seconds()
        self._status = response.status_code
        try:
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                await self._stream(response, send)
                return None
            return await self._whole(response, send)
        finally:
            await response.aclose()

    def _request(self, client: httpx.AsyncClient) -> httpx.Request:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._route.key is not None:
            headers["Authorization"] = f"Bearer {self._route.key}"
        url = f"{self._route.url}/{self._call.path}"
        return client.build_request("POST", url, content=self._call.content, headers=headers)

    async def _whole(self, response: httpx.Response, send: Send) -> JSONResponse | None:
        content, trouble = bytearray(), ""
        try:
            async for piece in self._pieces(response):
                content += piece
                if len(content) > self._desk.settings.max_answer_bytes:
                    return self._failed(502, "too_large", f"the answer of {_NO_ENDPOINT} is too large")
        except (TimeoutError, httpx.TransportError, httpx.DecodingError):
            trouble = "cut"
        body = self._blackout.whole(bytes(content))
        answer = whole_answer(body)
        self._answer = answer or Answer()
        if not response.is_success:
            trouble = trouble or "status"
        elif answer is None:
            trouble = trouble or "broken"
        self._record(trouble, body.decode("utf-8", "replace") if trouble else "")
        # The announced length of an incomplete body is one byte too large, so that the client also sees that it is incomplete.
        length = len(body) + (trouble == "cut")
        await self._start(send, response, {"content-length": str(length)})
        await send({"type": "http.response.body", "body": body, "more_body": trouble == "cut"})
        return None

    async def _stream(self, response: httpx.Response, send: Send) -> None:
        await self._start(send, response, {"cache-control": "no-cache"})
        stream = EventStream(hide_usage=self._call.hide_usage)
        self._answer = stream.answer
        trouble, size = "", 0
        try:
            async for piece in self._pieces(response):
                size += len(piece)
                if size > self._desk.settings.max_answer_bytes:
                    trouble = "too_large"
                    break
                passed = stream.feed(self._blackout.feed(piece))
                if stream.answer.done:
                    self._record(_stream_trouble(stream), stream.error)
                if passed:
                    await send({"type": "http.response.body", "body": passed, "more_body": True})
        except (TimeoutError, httpx.TransportError, httpx.DecodingError):
            trouble = "cut"
        if rest := stream.feed(self._blackout.end()) + stream.end():
            await send({"type": "http.response.body", "body": rest, "more_body": True})
        self._record(trouble or _stream_trouble(stream), stream.error)
        if not trouble:  # otherwise the stream has no end, and the server closes the connection
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pieces(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """Yield the pieces of the body as they arrive.

        Raises:
            TimeoutError: No piece arrived for too long.
        """
        pieces = response.aiter_bytes()
        while True:
            async with asyncio.timeout(self._desk.settings.silence_s):
                piece = await anext(pieces, None)
            if piece is None:
                return
            yield piece

    async def _start(self, send: Send, response: httpx.Response, own: dict[str, str]) -> None:
        passed = {
            name: value
            for name, value in response.headers.items()
            if name in _PASSED or name.startswith(_PASSED_BEGINNINGS)
        }
        headers = [
            (name.encode(), self._blackout.whole(value.encode("latin-1")))
            for name, value in (passed | own).items()
        ]
        self._started = True
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})

    def _failed(self, status: int, trouble: str, message: str) -> JSONResponse:
        self._record(trouble, message)
        return error_response(status, trouble, message)

    def _record(self, trouble: str, error: str = "") -> None:
        """Log the call, at most once.

        Raises:
            UnloggedError: The log cannot be written.
        """
        if self._logged:
            return
        self._logged = True
        body, answer = dict(self._call.body), self._answer
        price = self._desk.settings.price(self._call.model)
        prompt, completion = answer.tokens("prompt_tokens"), answer.tokens("completion_tokens")
        usage = Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            seconds=self._seconds(),
            cost_usd=price.usd(prompt, completion, answer.cached_tokens) if price else 0.0,
        )
        messages, tools = body.pop("messages", ()), body.pop("tools", None)
        call = ModelCall(
            path=self._call.path,
            model=self._call.model,
            messages=messages if isinstance(messages, list) else (),
            tools=tools if isinstance(tools, list) else (),
            prompt=body.pop("prompt", None),
            request={key: value for key, value in body.items() if key != "model"},
            choices=answer.in_order,
            answered_by=answer.model,
            stream=bool(body.get("stream")),
            status=self._status,
            trouble=trouble,
            error=error[:_ERROR_CHARS],
            first_s=self._first_s,
            priced=price is not None,
        )
        try:
            self._desk.log.record(self._label, call, usage)
        except OSError as error:
            raise UnloggedError(error) from error
        self._desk.count(trouble or "ok")

    def _seconds(self) -> float:
        return round(time.monotonic() - self._began, 6)


def _stream_trouble(stream: EventStream) -> str:
    if stream.error:
        return "status"
    if stream.broken:
        return "broken"
    return "" if stream.answer.finished else "cut"
