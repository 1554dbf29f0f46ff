"""A server with one kind of work: ``POST`` a JSON request, get a JSON answer.

| request | answer |
|---|---|
| ``POST`` to the server's path | 200 with the answer |
| ``GET /health`` | 200; needs no token |
| ``GET /metrics`` | numbers for Prometheus |

Every other status is ``{"error": "...", "kind": "..."}``: 400 no valid request, 401 no token, 408 the body came too slowly,
413 too large, 429 busy (with ``Retry-After``), 500 a fault of the server, 502 the service behind it failed, 503 out of time.
No answer holds a key or a stack trace.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from afm.errors import DataError
from tool_servers.shared.access import allowed
from tool_servers.shared.admission import Admission, BusyError
from tool_servers.shared.metrics import CONTENT_TYPE, Count, Durations, Gauge, page
from tool_servers.shared.requests import GoneError, TooLargeError, bounded_body, refused, while_connected
from tool_servers.shared.settings import ServerSettings
from tool_servers.shared.upstream import Trouble, UpstreamError

RequestT = TypeVar("RequestT", bound=BaseModel)

_log = logging.getLogger(__name__)
_BODY_S = 15.0
_GONE = 499  # nobody reads it
_SPENT = 402
_MAX_REQUEST_BYTES = 256 << 10
_BOUNDS_S = (0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120)


class Endpoint(Generic[RequestT]):
    """Serves ``work``.

    Args:
        name: In the names of the metrics.
        model: What the body of a request must be.
        work: Its answer; a ``DataError`` becomes status 400, an ``UpstreamError`` 502, or 402 when a budget is spent.
        work_s: The longest work; then status 503.
        token: What requests must carry; ``None`` lets everyone in.
        metrics: Numbers of its own.
        close: Called when the server stops.
    """

    def __init__(
        self,
        name: str,
        path: str,
        model: type[RequestT],
        work: Callable[[RequestT], Awaitable[Mapping[str, Any]]],
        settings: ServerSettings,
        *,
        work_s: float,
        token: str | None,
        metrics: Sequence[Count | Gauge | Durations] = (),
        close: Callable[[], Awaitable[None]],
    ) -> None:
        self._path, self._model, self._work = path, model, work
        self._token, self._close = token, close
        self._work_s = work_s
        self._admission = Admission(settings.max_parallel, settings.max_waiting, settings.max_wait_s)
        self._answered = Count(f"afm_{name}_requests_total", "Requests, by status.", "status", ("200",))
        self._seconds = Durations(
            f"afm_{name}_request_seconds", "Time of an answered request, waiting included.", _BOUNDS_S
        )
        self._metrics = (
            self._answered,
            self._seconds,
            Gauge(f"afm_{name}_running", "Requests at work now.", lambda: self._admission.running),
            Gauge(f"afm_{name}_waiting", "Requests waiting now.", lambda: self._admission.waiting),
            *metrics,
        )

    def app(self) -> FastAPI:
        """The application."""
        app = FastAPI(lifespan=self._life, docs_url=None, redoc_url=None, openapi_url=None)
        app.add_exception_handler(HTTPException, refused)
        app.post(self._path)(self.answer)
        app.get("/health")(self.health)
        app.get("/metrics")(self.metrics)
        return app

    async def answer(self, request: Request) -> Response:
        """Do the work of one request."""
        began = time.monotonic()
        if not allowed(request.headers, self._token):
            return self._no_token()
        try:
            body = await bounded_body(request, _MAX_REQUEST_BYTES, _BODY_S)
            asked = self._model.model_validate_json(body)
        except TooLargeError as error:
            return self._refusal(413, "too_large", str(error), {"Connection": "close"})
        except TimeoutError:
            return self._refusal(408, "slow", f"the request did not arrive within {_BODY_S:g} s")
        except GoneError:
            return self._refusal(_GONE, "gone", "the client has left")
        except ValidationError as error:
            return self._refusal(400, "request", _explained(error))
        response = await self._worked(request, asked)
        if response.status_code == 200:
            self._answered.add("200")
            self._seconds.add(time.monotonic() - began)
        return response

    async def health(self) -> Response:
        """That the server is there, and how busy it is."""
        return JSONResponse(
            {"status": "ok", "running": self._admission.running, "waiting": self._admission.waiting}
        )

    async def metrics(self, request: Request) -> Response:
        """Numbers for Prometheus."""
        if not allowed(request.headers, self._token):
            return self._no_token()
        return PlainTextResponse(page(self._metrics), media_type=CONTENT_TYPE)

    async def _worked(self, request: Request, asked: RequestT) -> Response:
        try:
            return JSONResponse(await while_connected(request, self._placed(asked)))
        except BusyError as error:
            return self._refusal(429, "busy", str(error), {"Retry-After": str(error.retry_after_s)})
        except DataError as error:
            return self._refusal(400, "request", error.message)
        except UpstreamError as error:
            status = _SPENT if error.trouble is Trouble.BUDGET else 502
            return self._refusal(status, error.trouble, str(error))
        except TimeoutError:
            return self._refusal(503, "timeout", f"no answer within {self._work_s:g} s")
        except GoneError:
            return self._refusal(_GONE, "gone", "the client has left")
        except Exception as error:  # noqa: BLE001 - the process border; its type alone is told
            _log.exception("%s failed", self._path)
            return self._refusal(500, "server", f"the server failed ({type(error).__name__}); see its log")

    async def _placed(self, asked: RequestT) -> Mapping[str, Any]:
        async with self._admission.place(), asyncio.timeout(self._work_s):
            return await self._work(asked)

    def _no_token(self) -> JSONResponse:
        return self._refusal(401, "token", "the token is missing or wrong", {"WWW-Authenticate": "Bearer"})

    def _refusal(
        self, status: int, kind: str, message: str, headers: dict[str, str] | None = None
    ) -> JSONResponse:
        self._answered.add(str(status))
        return JSONResponse({"error": message, "kind": kind}, status_code=status, headers=headers)

    @asynccontextmanager
    async def _life(self, _: FastAPI) -> AsyncIterator[None]:
        yield
        await self._close()


def _explained(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}"
