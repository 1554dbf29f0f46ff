"""What every server does with a request: its key, its body, a place at work, errors in one form, numbers.

| request | answer |
|---|---|
| to a path of the server's own | 200 with its answer |
| ``GET /health`` | 200, 503 when the server cannot work; needs no token |
| ``GET /metrics`` | numbers for Prometheus |

Every other status is ``{"error": "...", "kind": "..."}``. Refused requests: 400 not valid, 401 no token, 402 no
budget left, 408 the body came too slowly, 413 too large, 429 busy (with ``Retry-After``). Failures: 500 a fault of
the server, 502 the service behind it failed, 503 out of time. No answer holds a key or a stack trace.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any, ClassVar, TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive

from afm.errors import DataError
from tool_servers.shared.command import ServerSettings
from tool_servers.shared.upstream import Trouble, UpstreamError

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")
ModelT = TypeVar("ModelT", bound=BaseModel)

_log = logging.getLogger(__name__)
_BOUNDS_S = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120)
disable_created_metrics()  # type: ignore[no-untyped-call]


class RefusalError(Exception):
    """A request that is answered with an error.

    Args:
        kind: One word for programs and for the server's numbers.
        message: For people.
    """

    def __init__(
        self, status: int, kind: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.headers = status, kind, headers


class BusyError(RefusalError):
    """No place is free. ``retry_after_s`` says when to come back, in whole seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(429, "busy", message, {"Retry-After": str(retry_after_s)})


class GoneError(RefusalError):
    """The sender has closed the connection, so the answer would not be read."""

    def __init__(self) -> None:
        super().__init__(499, "gone", "the client has left")


class Admission:
    """Lets requests in, in order of arrival. Beyond the places at work and in the queue, requests are refused.

    Args:
        parallel: Requests at work at the same time.
        waiting: Requests that may wait; further ones are refused.
        wait_s: The longest wait.
    """

    def __init__(self, parallel: int, waiting: int, wait_s: float) -> None:
        self._parallel = parallel
        self._most_waiting = waiting
        self._wait_s = wait_s
        self._slots = asyncio.Semaphore(parallel)
        self._typical_s = 0.1
        self.running = 0
        self.waiting = 0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place at work.

        Raises:
            BusyError: All places are taken.
        """
        if self._slots.locked() and self.waiting >= self._most_waiting:
            raise BusyError(f"{self.running} running, {self.waiting} waiting", self._retry_after_s())
        await self._slot()
        self.running += 1
        began = time.monotonic()
        try:
            yield
        finally:
            self.running -= 1
            self._slots.release()
            self._typical_s += 0.1 * (time.monotonic() - began - self._typical_s)

    async def _slot(self) -> None:
        self.waiting += 1
        try:
            async with asyncio.timeout(self._wait_s):
                await self._slots.acquire()
        except TimeoutError:
            message = f"waited {self._wait_s:g} s, {self.running} still running"
            raise BusyError(message, self._retry_after_s()) from None
        finally:
            self.waiting -= 1

    def _retry_after_s(self) -> int:
        """How long the queue needs to move by half, as far as past requests tell."""
        return max(1, min(30, math.ceil(self.waiting * self._typical_s / self._parallel / 2)))


class Endpoint:
    """The way of requests through one server.

    Args:
        name: In the names of the metrics.
        token: What requests must carry; ``None`` lets everyone in.
        max_bytes: Of a request's body.
        max_held_bytes: Of all bodies that are read or worked on together; further requests get status 429.
        body_s: For the arrival of a body; then status 408.
        work_s: The longest work; then status 503.
        metrics: Numbers of the server's own.
    """

    no_key: ClassVar[str] = "the token is missing or wrong"
    advice: ClassVar[str] = ""
    """Ends the message to whoever asks for a path that there is not."""

    def __init__(
        self,
        name: str,
        settings: ServerSettings,
        *,
        token: str | None,
        max_bytes: int = 256 << 10,
        max_held_bytes: float = math.inf,
        body_s: float = 15.0,
        work_s: float | None = None,
        metrics: Sequence[Collector] = (),
    ) -> None:
        self._token, self._max_bytes, self._body_s, self._work_s = token, max_bytes, body_s, work_s
        self._held_bytes, self._max_held_bytes = 0, max(max_held_bytes, max_bytes)
        self.admission = Admission(settings.max_parallel, settings.max_waiting, settings.max_wait_s)
        self._outcomes = Counter(f"afm_{name}_requests", "Requests, by outcome.", ["outcome"], registry=None)
        self._outcomes.labels("ok")
        self._seconds = Histogram(
            f"afm_{name}_request_seconds",
            "Time of an answered request, waiting included.",
            buckets=_BOUNDS_S,
            registry=None,
        )
        running = gauge(f"afm_{name}_running", "Requests at work now.", lambda: self.admission.running)
        waiting = gauge(f"afm_{name}_waiting", "Requests waiting now.", lambda: self.admission.waiting)
        self._registry = CollectorRegistry()
        for metric in (self._outcomes, self._seconds, running, waiting, *metrics):
            self._registry.register(metric)

    def app(
        self,
        *routes: Route,
        life: Callable[[], AbstractAsyncContextManager[Any]],
        facts: Mapping[str, Any] | None = None,
        trouble: Callable[[], Awaitable[str]] | None = None,
    ) -> Starlette:
        """The application with ``routes``, ``/health`` and ``/metrics``.

        Args:
            life: Entered before the first request, left after the last.
            facts: What ``/health`` also says.
            trouble: Why the server cannot work, empty when it can; only senders with the token get the reason.
        """

        async def health(request: Request) -> Response:
            reason = await trouble() if trouble else ""
            state: dict[str, Any] = {"status": "failing" if reason else "ok", **(facts or {})}
            with suppress(DataError):  # a key that cannot be read lets nobody in
                if reason and self.allows(request.headers):
                    state["error"] = reason
            state |= {"running": self.admission.running, "waiting": self.admission.waiting}
            return JSONResponse(state, status_code=503 if reason else 200)

        async def metrics(_: Request) -> Response:
            return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

        return Starlette(
            routes=[*routes, Route("/health", health), self.get("/metrics", metrics)],
            lifespan=lambda _: life(),
            exception_handlers={HTTPException: self._unknown},
        )

    def get(self, path: str, work: Callable[[Request], Awaitable[Response]]) -> Route:
        """A path that only needs the token."""

        async def answer(request: Request) -> Response:
            try:
                self.check_key(request)
            except Exception as error:  # noqa: BLE001 - what a key holds besides may be wrong, too
                return self.refuse(self._refusal_for(error, path))
            return await work(request)

        return Route(path, answer)

    def post(
        self,
        path: str,
        parse: Callable[[Request, bytes], RequestT],
        work: Callable[[RequestT], Awaitable[Response | Mapping[str, Any]]],
    ) -> Route:
        """A path to which requests with a body are posted.

        Args:
            parse: Reads a body before the request waits for its place; see :func:`json_body`.
            work: The answer. It is cancelled when the sender leaves. Its errors become statuses: ``DataError`` 400,
                ``UpstreamError`` 502 or 402, ``TimeoutError`` 503, ``RefusalError`` its own, others 500.
        """

        async def answer(request: Request) -> Response:
            began = time.monotonic()
            try:
                response = await self._response(request, parse, work)
            except Exception as error:  # noqa: BLE001 - the process border; its type alone is shown
                return self.refuse(self._refusal_for(error, path))
            self.count("ok" if response.status_code < 400 else str(response.status_code))
            self._seconds.observe(time.monotonic() - began)
            return response

        return Route(path, answer, methods=["POST"])

    def check_key(self, request: Request) -> None:
        """Refuse a request without the token.

        Raises:
            RefusalError: Status 401.
        """
        if not self.allows(request.headers):
            raise RefusalError(401, "token", self.no_key, {"WWW-Authenticate": "Bearer"})

    def allows(self, headers: Mapping[str, str]) -> bool:
        """Whether these headers carry the token; any do when the server needs no token. Takes constant time."""
        if self._token is None:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(key.lstrip(" ").encode("utf-8", "replace"), self._token.encode())
        return same and scheme.lower() == "bearer"

    async def body(self, request: Request) -> bytes:
        """The body of a request.

        Raises:
            RefusalError: It is too large or too slow, or its sender has left.
        """
        return await _bounded_body(request, self._max_bytes, self._body_s)

    def refuse(self, refusal: RefusalError) -> JSONResponse:
        """Count a refusal and put it into the form of all errors."""
        self.count(refusal.kind)
        return JSONResponse(self.error_body(refusal), refusal.status, refusal.headers)

    def error_body(self, refusal: RefusalError) -> dict[str, Any]:
        """The form of an error."""
        return {"error": str(refusal), "kind": refusal.kind}

    def count(self, outcome: str) -> None:
        """One more request that ended like this."""
        self._outcomes.labels(outcome).inc()

    async def _response(
        self,
        request: Request,
        parse: Callable[[Request, bytes], RequestT],
        work: Callable[[RequestT], Awaitable[Response | Mapping[str, Any]]],
    ) -> Response:
        self.check_key(request)
        with self._held(min(self._max_bytes, _announced_bytes(request, self._max_bytes))):
            body = await self.body(request)
            try:
                parsed = parse(request, body)
            except ValidationError as error:
                raise RefusalError(400, "request", explained(error)) from None
            answer = await while_connected(request.receive, self._placed(work, parsed))
        return answer if isinstance(answer, Response) else JSONResponse(answer)

    async def _placed(
        self, work: Callable[[RequestT], Awaitable[Response | Mapping[str, Any]]], parsed: RequestT
    ) -> Response | Mapping[str, Any]:
        async with self.admission.place(), asyncio.timeout(self._work_s):
            return await work(parsed)

    @contextmanager
    def _held(self, size: int) -> Iterator[None]:
        if self._held_bytes + size > self._max_held_bytes:
            raise BusyError(f"{self._held_bytes} bytes of requests are held", 1)
        self._held_bytes += size
        try:
            yield
        finally:
            self._held_bytes -= size

    def _refusal_for(self, error: Exception, path: str) -> RefusalError:
        match error:
            case RefusalError():
                return error
            case DataError():
                return RefusalError(400, "request", error.message)
            case UpstreamError():
                status = 402 if error.trouble is Trouble.BUDGET else 502
                return RefusalError(status, error.trouble, str(error))
            case TimeoutError() if self._work_s is not None:
                return RefusalError(503, "timeout", f"no answer within {self._work_s:g} s")
        _log.error("%s failed", path, exc_info=error)
        return RefusalError(500, "server", f"the server failed ({type(error).__name__}); see its log")

    async def _unknown(self, request: Request, error: Exception) -> Response:
        """A path that there is not (404) or a method that it does not take (405)."""
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path[:200]}: {error.detail}{self.advice}"
        return self.refuse(RefusalError(error.status_code, "request", message, error.headers))


class TimedRequest(BaseModel):
    """A request whose sender waits for ``seconds``, including the time in the queue; unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    seconds: float | None = Field(default=None, gt=0)
    _arrived: float = PrivateAttr(default_factory=time.monotonic)

    def until(self, longest_s: float) -> float:
        """When the sender stops waiting, on the monotonic clock; no request takes longer than ``longest_s``."""
        return self._arrived + min(self.seconds or longest_s, longest_s)

    def waited_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self._arrived


def json_body(model: type[ModelT]) -> Callable[[Request, bytes], ModelT]:
    """Reads a body as the JSON of ``model``."""
    return lambda _, body: model.model_validate_json(body)


def explained(error: ValidationError) -> str:
    """The first mistake in a request: where it is, and what was expected."""
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}"


def gauge(name: str, text: str, value: Callable[[], float]) -> Gauge:
    """A number that is asked for when it is read."""
    metric = Gauge(name, text, registry=None)
    metric.set_function(value)
    return metric


def counter(name: str, text: str, label: str, values: Sequence[str]) -> Counter:
    """A count by ``label`` that shows ``values`` from the beginning, so that a rate is known for the first event."""
    metric = Counter(name, text, [label], registry=None)
    for value in values:
        metric.labels(value)
    return metric


def closing(close: Callable[[], Awaitable[None]]) -> Callable[[], AbstractAsyncContextManager[None]]:
    """The life of an application that only has something to close at its end."""

    @asynccontextmanager
    async def life() -> AsyncIterator[None]:
        yield
        await close()

    return life


def _announced_bytes(request: Request, unknown: int) -> int:
    """The length that a request says its body has."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else unknown


async def _bounded_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    too_large = RefusalError(
        413, "too_large", f"the request is longer than {max_bytes} bytes", {"Connection": "close"}
    )
    if _announced_bytes(request, 0) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except ClientDisconnect:
        raise GoneError from None
    except TimeoutError:
        message = f"the request did not arrive within {seconds:g} s"
        raise RefusalError(408, "slow", message, {"Connection": "close"}) from None
    return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The result of ``work``, which is cancelled when the sender closes the connection. The body has been read.

    Raises:
        GoneError: The sender left; the work has ended.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise GoneError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _left(receive: Receive) -> None:
    """Returns when the sender has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
