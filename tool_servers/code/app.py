"""The code server's HTTP interface.

| request | answer |
|---|---|
| ``POST /run`` | 200 with the result of the run, whatever the program did |
| ``GET /health`` | 200 when programs run here, else 503; needs no token |
| ``GET /metrics`` | numbers for Prometheus |

Every other status is ``{"error": "..."}``: 400 no valid request, 401 no token, 413 too large, 422 limits beyond the server's,
429 busy (with ``Retry-After``), 503 the sandbox failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from afm.errors import ConfigError, DataError, SandboxBusyError, SandboxError
from afm.sandbox import ExitReason, RunResult, Sandbox, SandboxLimits, limits_from
from afm.tools.remote import RUN_PATH, RunRequest, result_body
from tool_servers.code.settings import CodeServerSettings, excess
from tool_servers.shared.access import allowed
from tool_servers.shared.admission import Admission, BusyError
from tool_servers.shared.metrics import CONTENT_TYPE, Count, Durations, Gauge, page
from tool_servers.shared.requests import (
    GoneError,
    TooLargeError,
    announced_bytes,
    bounded_body,
    refused,
    while_connected,
)

_BODY_S = 15.0
_FRESH_S = 5.0
_TRIAL = "print(6 * 7)"
_GONE = 499  # nobody reads it


class CodeServer:
    """Runs programs that come by HTTP.

    Args:
        sandbox: Closed when the server stops.
        token: What requests must carry; ``None`` lets everyone in.
    """

    def __init__(self, sandbox: Sandbox, settings: CodeServerSettings, token: str | None) -> None:
        self._sandbox = sandbox
        self._token = token
        self._most, self._usual = settings.ceiling(), settings.usual()
        self._max_bytes = settings.max_request_bytes
        self._most_held = max(settings.max_held_bytes, settings.max_request_bytes)
        self._held_bytes = 0
        self._admission = Admission(settings.parallel(), settings.max_waiting, settings.max_wait_s)
        self._trying = asyncio.Lock()
        self._known_at, self._trouble = float("-inf"), ""
        self._refused = Count(
            "afm_code_refused_total",
            "Requests that ran no program.",
            "why",
            ("busy", "gone", "limits", "request", "sandbox", "token", "too_large"),
        )
        self._runs = Count(
            "afm_code_runs_total", "Programs run, by how they ended.", "reason", tuple(ExitReason)
        )
        self._seconds = Durations(
            "afm_code_request_seconds",
            "Time of a run, waiting included.",
            (0.02, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30),
        )
        self._metrics = (
            self._runs,
            self._refused,
            self._seconds,
            Gauge("afm_code_running", "Programs running now.", lambda: self._admission.running),
            Gauge("afm_code_waiting", "Requests waiting now.", lambda: self._admission.waiting),
        )

    def app(self) -> FastAPI:
        """The application."""
        app = FastAPI(lifespan=self._life, docs_url=None, redoc_url=None, openapi_url=None)
        app.add_exception_handler(HTTPException, refused)
        app.post(RUN_PATH)(self.run)
        app.get("/health")(self.health)
        app.get("/metrics")(self.metrics)
        return app

    async def run(self, request: Request) -> Response:
        """Run one program."""
        if not allowed(request.headers, self._token):
            return self._refusal(
                401, "token", "the token is missing or wrong", {"WWW-Authenticate": "Bearer"}
            )
        began = time.monotonic()
        try:
            with self._held(min(self._max_bytes, announced_bytes(request, self._max_bytes))):
                body = await bounded_body(request, self._max_bytes, _BODY_S)
                asked, limits = self._asked(body)
                result = await while_connected(request, self._run(asked, limits))
        except (DataError, TooLargeError) as error:
            return self._refusal(413, "too_large", str(error), {"Connection": "close"})
        except ValueError as error:
            return self._refusal(400, "request", str(error))
        except _LimitError as error:
            return self._refusal(422, "limits", str(error))
        except TimeoutError:
            return self._refusal(408, "request", f"the request did not arrive within {_BODY_S:g} s")
        except GoneError:
            return self._refusal(_GONE, "gone", "the client has left")
        except BusyError as error:
            return self._refusal(429, "busy", str(error), {"Retry-After": str(error.retry_after_s)})
        except SandboxBusyError as error:
            return self._refusal(429, "busy", str(error), {"Retry-After": "1"})
        except SandboxError as error:
            return self._refusal(503, "sandbox", str(error))
        self._runs.add(result.reason.value)
        self._seconds.add(time.monotonic() - began)
        return Response(result_body(result), media_type="application/json")

    async def health(self, request: Request) -> Response:
        """Whether programs run here; tried out, by one request at a time, when none has run in the last seconds.

        Why they do not run is told only to those who have the token.
        """
        async with self._trying:
            if time.monotonic() - self._known_at > _FRESH_S:
                await self._try()
        state = {"running": self._admission.running, "waiting": self._admission.waiting}
        if self._trouble:
            reason = {"error": self._trouble} if allowed(request.headers, self._token) else {}
            return JSONResponse({"status": "failing", **reason, **state}, status_code=503)
        return JSONResponse({"status": "ok", **state})

    async def metrics(self, request: Request) -> Response:
        """Numbers for Prometheus."""
        if not allowed(request.headers, self._token):
            return self._refusal(
                401, "token", "the token is missing or wrong", {"WWW-Authenticate": "Bearer"}
            )
        return PlainTextResponse(page(self._metrics), media_type=CONTENT_TYPE)

    @contextmanager
    def _held(self, size: int) -> Iterator[None]:
        """Room for a request of this size.

        Raises:
            BusyError: There is none.
        """
        if self._held_bytes + size > self._most_held:
            raise BusyError(f"{self._held_bytes} bytes of requests are held", 1)
        self._held_bytes += size
        try:
            yield
        finally:
            self._held_bytes -= size

    async def _try(self) -> None:
        try:
            await self._run(RunRequest(code=_TRIAL), self._usual)
        except (BusyError, SandboxBusyError):
            self._known(trouble="")  # full of work is well
        except SandboxError:
            pass  # noted

    async def _run(self, asked: RunRequest, limits: SandboxLimits) -> RunResult:
        async with self._admission.place():
            try:
                result = await self._sandbox.run(asked.code, asked.stdin, limits)
            except SandboxBusyError:
                raise
            except SandboxError as error:
                self._known(trouble=str(error))
                raise
        self._known(trouble="")
        return result

    def _known(self, *, trouble: str) -> None:
        self._known_at, self._trouble = time.monotonic(), trouble

    def _asked(self, body: bytes) -> tuple[RunRequest, SandboxLimits]:
        try:
            asked = RunRequest.model_validate_json(body)
            limits = limits_from(self._usual.model_dump() | asked.limits)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
            raise ValueError(f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}") from None
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if problem_text := excess(limits, self._most):
            raise _LimitError(problem_text)
        return asked, limits

    def _refusal(
        self, status: int, why: str, message: str, headers: dict[str, str] | None = None
    ) -> JSONResponse:
        self._refused.add(why)
        return JSONResponse({"error": message}, status_code=status, headers=headers)

    @asynccontextmanager
    async def _life(self, _: FastAPI) -> AsyncIterator[None]:
        yield
        await self._sandbox.close()


class _LimitError(Exception):
    """The request asks for more than the server allows."""
