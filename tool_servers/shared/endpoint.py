"""What every server does with a request: check its token, read its body, queue it, report errors, count.

| request | answer |
|---|---|
| to a path of the server | 200 with its answer |
| ``GET /health`` | 200, or 503 when the server cannot work; needs no token |
| ``GET /metrics`` | metrics for Prometheus |

Every other status has the body ``{"error": "...", "kind": "..."}``. Refused requests: 400 invalid, 401 no token, 402 no
budget left, 408 body too slow, 413 too large, 429 busy (with ``Retry-After``). Failures: 500 the server failed,
502 the service behind it failed, 503 timeout. No answer contains a key or a stack trace.
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

from afm.errors import DataError, first_fault
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
        kind: One word for programs and for the metrics.
        message: For people.
    """

    def __init__(
        self, status: int, kind: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.headers = status, kind, headers


class BusyError(RefusalError):
    """All places are taken. ``retry_after_s`` is the number of seconds after which to try again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(429, "busy", message, {"Retry-After": str(retry_after_s)})


class GoneError(RefusalError):
    """The client has closed the connection and will not read the answer."""

    def __init__(self) -> None:
        super().__init__(499, "gone", "the client has left")


class Admission:
    """Admits requests in order of arrival, and refuses them when all places and the queue are full.

    Args:
        parallel: Requests that run at the same time.
        waiting: Requests that may wait in the queue.
        wait_s: Longest wait in the queue, in seconds.
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
        """Hold a place for one request.

        Raises:
            BusyError: The queue is full, or the wait was too long.
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
        """Estimate from past requests how long the queue needs to shrink by half."""
        return max(1, min(30, math.ceil(self.waiting * self._typical_s / self._parallel / 2)))


class Endpoint:
    """Handles the requests of one server.

    Args:
        name: Part of the metrics' names.
        token: Token that requests must carry; ``None`` admits everyone.
        max_bytes: Largest body of a request.
        max_held_bytes: Largest size of all bodies held at the same time; further requests get status 429.
        body_s: Seconds for a body to arrive; then status 408.
        work_s: Seconds to answer a request; then status 503.
        metrics: Further metrics of the server.
    """

    no_key: ClassVar[str] = "the token is missing or wrong"
    advice: ClassVar[str] = ""
    """Appended to the error message for an unknown path."""

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
        """Return the application with ``routes``, ``/health`` and ``/metrics``.

        Args:
            life: Context entered before the first request and left after the last.
            facts: Further fields of ``/health``.
            trouble: Returns why the server cannot work, or an empty text. Only clients with the token get the reason.
        """

        async def health(request: Request) -> Response:
            reason = await trouble() if trouble else ""
            state: dict[str, Any] = {"status": "failing" if reason else "ok", **(facts or {})}
            with suppress(DataError):  # an unreadable key admits nobody
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
        """Return a GET route that only needs the token."""

        async def answer(request: Request) -> Response:
            try:
                self.check_key(request)
            except Exception as error:  # noqa: BLE001 - a key may carry further fields, which may be invalid
                return self.refuse(self._refusal_for(error, path))
            return await work(request)

        return Route(path, answer)

    def post(
        self,
        path: str,
        parse: Callable[[Request, bytes], RequestT],
        work: Callable[[RequestT], Awaitable[Response | Mapping[str, Any]]],
    ) -> Route:
        """Return a POST route.

        Args:
            parse: Parses the body before the request is queued; see :func:`json_body`.
            work: Returns the answer; cancelled when the client leaves. Its errors become statuses: ``DataError`` 400,
                ``UpstreamError`` 502 or 402, ``TimeoutError`` 503, ``RefusalError`` its own, others 500.
        """

        async def answer(request: Request) -> Response:
            began = time.monotonic()
            try:
                response = await self._response(request, parse, work)
            except Exception as error:  # noqa: BLE001 - the process border; clients see only the type
                return self.refuse(self._refusal_for(error, path))
            self.count("ok" if response.status_code < 400 else str(response.status_code))
            self._seconds.observe(time.monotonic() - began)
            return response

        return Route(path, answer, methods=["POST"])

    def check_key(self, request: Request) -> None:
        """Check that a request carries the token.

        Raises:
            RefusalError: Status 401: it does not.
        """
        if not self.allows(request.headers):
            raise RefusalError(401, "token", self.no_key, {"WWW-Authenticate": "Bearer"})

    def allows(self, headers: Mapping[str, str]) -> bool:
        """Return, in constant time, whether these headers carry the token; always true without a token."""
        if self._token is None:
            return True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(key.lstrip(" ").encode("utf-8", "replace"), self._token.encode())
        return same and scheme.lower() == "bearer"

    async def body(self, request: Request) -> bytes:
        """Read the body of a request.

        Raises:
            RefusalError: The body is too large or too slow, or the client has left.
        """
        return await _bounded_body(request, self._max_bytes, self._body_s)

    def refuse(self, refusal: RefusalError) -> JSONResponse:
        """Count a refusal and return its response."""
        self.count(refusal.kind)
        return JSONResponse(self.error_body(refusal), refusal.status, refusal.headers)

    def error_body(self, refusal: RefusalError) -> dict[str, Any]:
        """Return the body of an error response."""
        return {"error": str(refusal), "kind": refusal.kind}

    def count(self, outcome: str) -> None:
        """Count a request with this outcome."""
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
                raise RefusalError(400, "request", first_fault(error, "body")) from None
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
        """Answer an unknown path (404) or method (405)."""
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path[:200]}: {error.detail}{self.advice}"
        return self.refuse(RefusalError(error.status_code, "request", message, error.headers))


class TimedRequest(BaseModel):
    """A request whose client waits for ``seconds``, including the time in the queue; unknown keys are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    seconds: float | None = Field(default=None, gt=0)
    _arrived: float = PrivateAttr(default_factory=time.monotonic)

    def until(self, longest_s: float) -> float:
        """Return when the client stops waiting, at most ``longest_s`` after arrival, on the monotonic clock."""
        return self._arrived + min(self.seconds or longest_s, longest_s)

    def waited_s(self) -> float:
        """Return the seconds since the request arrived."""
        return time.monotonic() - self._arrived


def json_body(model: type[ModelT]) -> Callable[[Request, bytes], ModelT]:
    """Return a parser of JSON bodies of type ``model``."""
    return lambda _, body: model.model_validate_json(body)


def gauge(name: str, text: str, value: Callable[[], float]) -> Gauge:
    """Return a gauge that calls ``value`` whenever the metrics are read."""
    metric = Gauge(name, text, registry=None)
    metric.set_function(value)
    return metric


def counter(name: str, text: str, label: str, values: Sequence[str]) -> Counter:
    """Return a counter by ``label`` that shows all ``values`` from the start, so that the first event has a rate."""
    metric = Counter(name, text, [label], registry=None)
    for value in values:
        metric.labels(value)
    return metric


def closing(close: Callable[[], Awaitable[None]]) -> Callable[[], AbstractAsyncContextManager[None]]:
    """Return the ``life`` of an application that only calls ``close`` at its end."""

    @asynccontextmanager
    async def life() -> AsyncIterator[None]:
        yield
        await close()

    return life


def _announced_bytes(request: Request, unknown: int) -> int:
    """Return the body's length as the request announces it, or else ``unknown``."""
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
    """Return the result of ``work``; cancel it if the client closes the connection. The body must have been read.

    Raises:
        GoneError: The client left; the work has ended.
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
    """Wait until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
