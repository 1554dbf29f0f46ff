"""The code server: runs programs from other machines in a pool of sandboxes.

| request | answer |
|---|---|
| ``POST /run`` | 200 with the result, even if the program failed |
| ``GET /health`` | 200 if programs run here, else 503 |

For the rest, see :mod:`tool_servers.shared.endpoint`. Further errors: 422 limits above those of the server, 503 the
sandbox failed.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, ClassVar

import httpx
from pydantic import BeforeValidator, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from afm.errors import ConfigError, DataError, SandboxBusyError, SandboxError
from afm.sandbox import (
    ExitReason,
    RunResult,
    Sandbox,
    SandboxLimits,
    SandboxSettings,
    limits_from,
    open_sandbox,
)
from afm.tools.remote import RUN_PATH, RunRequest, result_body
from tool_servers.shared.command import CORES, Launch, ServerSettings, or_cores
from tool_servers.shared.endpoint import Endpoint, RefusalError, closing, counter
from tool_servers.shared.serve import ServedApp

_CEILING = SandboxLimits(
    wall_s=180.0,
    cpu_s=180,
    memory_bytes=8 << 30,
    file_bytes=256 << 20,
    output_bytes=64 << 20,
    stdin_bytes=64 << 20,
    processes=64,
    open_files=1024,
)
_FRESH_S = 5.0
_TRIAL = "print(6 * 7)"


def _with_ceiling(limits: Any) -> Any:
    return _CEILING.model_dump() | limits if isinstance(limits, dict) else limits


class CodeServerSettings(ServerSettings):
    """The YAML of a code server."""

    content: ClassVar[str] = "code server settings"

    sandbox: SandboxSettings = SandboxSettings()
    """Settings of the sandbox that runs the programs."""
    max_limits: Annotated[SandboxLimits, BeforeValidator(_with_ceiling)] = _CEILING
    """Largest limits that a request may set, by field of :class:`SandboxLimits`. Fields not set have generous maximums."""
    max_parallel: Annotated[int, or_cores()] = Field(default=CORES, ge=1, validate_default=True)
    """Programs that run at the same time. ``null``: the number of cores."""
    max_waiting: int = Field(default=256, ge=0)
    max_wait_s: float = Field(default=30.0, gt=0)
    max_request_bytes: int = Field(default=64 << 20, ge=1024)
    """Largest request."""
    max_held_bytes: int = Field(default=1 << 30, ge=1024)
    """Total size of all requests that run or wait. Further ones get status 429."""

    def usual(self) -> SandboxLimits:
        """Return the limits of a request that sets none: the defaults, capped at ``max_limits``."""
        most = self.max_limits
        return limits_from({name: min(value, getattr(most, name)) for name, value in SandboxLimits()})


class CodeServer:
    """Runs programs received over HTTP.

    Args:
        sandbox: Runs the programs; closed when the server stops.
        token: Token that requests must carry; ``None`` admits everyone.
    """

    def __init__(self, sandbox: Sandbox, settings: CodeServerSettings, token: str | None) -> None:
        self._sandbox = sandbox
        self._most, self._usual = settings.max_limits, settings.usual()
        self._trying = asyncio.Lock()
        self._tried_at, self._trouble = float("-inf"), ""
        self._runs = counter("afm_code_runs", "Programs run, by how they ended.", "reason", tuple(ExitReason))
        self._endpoint = Endpoint(
            "code",
            settings,
            token=token,
            max_bytes=settings.max_request_bytes,
            max_held_bytes=settings.max_held_bytes,
            metrics=(self._runs,),
        )

    def app(self) -> Starlette:
        """Return the application."""
        run = self._endpoint.post(RUN_PATH, self._parse, self._answer)
        return self._endpoint.app(run, life=closing(self._sandbox.close), trouble=self._known_trouble)

    def _parse(self, _: Request, body: bytes) -> tuple[RunRequest, SandboxLimits]:
        request = RunRequest.model_validate_json(body)
        try:
            limits = limits_from(self._usual.model_dump() | request.limits)
        except ConfigError as error:
            raise RefusalError(400, "request", str(error)) from None
        for name, value in limits:
            most = getattr(self._most, name)
            if value > most:
                message = (
                    f"limits.{name}: got {value:g}, this server allows at most {most:g} (its max_limits)"
                )
                raise RefusalError(422, "limits", message)
        return request, limits

    async def _answer(self, parsed: tuple[RunRequest, SandboxLimits]) -> Response:
        request, limits = parsed
        try:
            result = await self._run(request.code, request.stdin, limits)
        except DataError as error:
            raise RefusalError(413, "too_large", str(error)) from None
        except SandboxBusyError as error:
            raise RefusalError(429, "busy", str(error), {"Retry-After": "1"}) from None
        except SandboxError as error:
            raise RefusalError(503, "sandbox", str(error)) from None
        self._runs.labels(result.reason.value).inc()
        return Response(result_body(result), media_type="application/json")

    async def _run(self, code: str, stdin: str, limits: SandboxLimits) -> RunResult:
        try:
            result = await self._sandbox.run(code, stdin, limits)
        except SandboxBusyError:
            raise
        except SandboxError as error:
            self._note(str(error))
            raise
        self._note("")
        return result

    async def _known_trouble(self) -> str:
        """Return why programs do not run here, or an empty text; run a trial program if none ran in the last seconds."""
        async with self._trying:
            if time.monotonic() - self._tried_at > _FRESH_S:
                try:
                    async with self._endpoint.admission.place():
                        await self._run(_TRIAL, "", self._usual)
                except (RefusalError, SandboxBusyError):
                    self._note("")  # a busy server is healthy
                except SandboxError:
                    pass  # _run has noted it
        return self._trouble

    def _note(self, trouble: str) -> None:
        self._tried_at, self._trouble = time.monotonic(), trouble


def check(launch: Launch) -> None:
    """Check the settings."""
    CodeServerSettings.read(launch.config)


def open_app(launch: Launch) -> ServedApp:
    """Open the application; a trial program runs before the first request."""
    settings, token = CodeServerSettings.read(launch.config), launch.address().token
    sandbox = open_sandbox(**settings.sandbox.options() | {"max_parallel": settings.max_parallel})

    async def prepare() -> None:
        result = await sandbox.run(_TRIAL)
        if result.stdout != "42\n":
            message = f"the trial program printed {result.stdout!r} {result.stderr!r}, expected 42"
            raise SandboxError(message)

    return ServedApp(CodeServer(sandbox, settings, token).app(), token, settings.finish_s, prepare)


def trial(client: httpx.Client) -> str:
    """Run one program."""
    result = client.post(RUN_PATH, json={"code": _TRIAL}).raise_for_status().json()["stdout"]
    if result != "42\n":
        raise ValueError(f"a program printed {result!r}, expected '42\\n'")
    return "a program printed 42"
