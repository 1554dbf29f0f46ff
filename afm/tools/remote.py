"""Sandboxes on other machines: programs go to the code server that is least busy, and to the next when it fails.

The code tool and a code server exchange one JSON object each way: :class:`RunRequest` and a ``RunResult``.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Any

import httpx
from pydantic import Field, TypeAdapter, ValidationError

from afm.configuration import Settings
from afm.endpoints.connections import Replicas, environment_key, server_address
from afm.endpoints.pace import pause_s
from afm.errors import ConfigError, DataError, SandboxError
from afm.sandbox import RunResult, SandboxLimits
from afm.tools.web_tool import (
    LONGEST_PAUSE_S,
    RequestFailedError,
    ServerFullError,
    connections_to,
    read_failure,
    status_failure,
    transport_failure,
)

RUN_PATH = "/run"
_RESULT = TypeAdapter(RunResult)


class RunRequest(Settings):
    """The body of ``POST /run``."""

    code: str
    stdin: str = ""
    limits: dict[str, float | int] = Field(default_factory=dict)
    """Some or all of :class:`SandboxLimits`; the rest are its defaults, or the server's most where that is
    less."""


def result_body(result: RunResult) -> bytes:
    """The JSON of a result."""
    return _RESULT.dump_json(result)


_CONNECT_TIMEOUT_S = 5.0
_TOKEN = "CODE_SERVER_TOKEN"
_EXAMPLE = "http://127.0.0.1:9002"


class RemoteSandbox:
    """A sandbox (:class:`afm.sandbox.Sandbox`) made of code servers.

    A program whose connection broke is sent to another server, so it may run twice: programs in a sandbox have no
    effect outside.

    Args:
        urls: Code servers, e.g. ``http://node1:9002``.
        token: Sent in the header ``Authorization`` and nowhere else.
        rounds: How often all servers are asked before a failure counts.
        busy_s: How long to keep asking servers that are well but full.
        queue_s: Longest wait for an answer beyond the run's own ``wall_s``: the server's queue, the transfer.

    Raises:
        ConfigError: No address, one that is not ``http://`` or ``https://``, or a token that no header can carry.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        rounds: int = 3,
        busy_s: float = 120.0,
        queue_s: float = 60.0,
    ) -> None:
        if not urls:
            raise ConfigError(f"urls: got an empty list, expected addresses such as {_EXAMPLE}")
        self._replicas = Replicas([server_address(url, RUN_PATH, _TOKEN, _EXAMPLE) for url in urls])
        self._connections = connections_to(token, _TOKEN)
        self._rounds = rounds
        self._busy_s = busy_s
        self._queue_s = queue_s

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of the code servers."""
        return self._replicas.urls

    async def run(self, code: str, stdin: str = "", limits: SandboxLimits | None = None) -> RunResult:
        """Run ``code`` on one of the servers. Cancelling closes the connection, and the server kills the run.

        Raises:
            DataError: The program or its input is larger than the servers take.
            SandboxError: No server could run it; the message says what each of them answered.
        """
        limits = limits or SandboxLimits()
        # Half characters, which JSON cannot carry, become question marks as in a local sandbox.
        code, stdin = (text.encode("utf-8", "replace").decode() for text in (code, stdin))
        request = RunRequest(code=code, stdin=stdin, limits=limits.model_dump())
        body = request.model_dump_json().encode()
        timeout = httpx.Timeout(limits.wall_s + self._queue_s, connect=_CONNECT_TIMEOUT_S)
        began = time.monotonic()
        failures = 0
        for attempt in itertools.count():
            answer = await self._ask_all(body, timeout)
            if isinstance(answer, RunResult):
                return answer
            full = [reason for reason in answer.values() if isinstance(reason, ServerFullError)]
            failures += not full
            late = time.monotonic() - began > self._busy_s
            if failures >= self._rounds or late or all(reason.lasting for reason in answer.values()):
                reasons = "; ".join(f"{url}: {reason}" for url, reason in answer.items())
                raise SandboxError(f"no code server could run the program: {reasons}")
            asked = min((reason.wait_s for reason in full), default=0.0)
            await asyncio.sleep(pause_s(attempt, asked, longest_s=LONGEST_PAUSE_S))
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self._connections.close()

    async def _ask_all(
        self, body: bytes, patience: httpx.Timeout
    ) -> RunResult | dict[str, RequestFailedError]:
        """Ask the servers one after the other, the least busy first."""
        failures: dict[str, RequestFailedError] = {}
        for server in self._replicas.order():
            try:
                with server.busy(ServerFullError, DataError):
                    return await self._ask(server.url, body, patience)
            except RequestFailedError as error:
                failures[server.url] = error
        return failures

    async def _ask(self, url: str, body: bytes, patience: httpx.Timeout) -> RunResult:
        try:
            with self._connections.client() as client:
                response = await client.post(f"{url}{RUN_PATH}", content=body, timeout=patience)
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise transport_failure(error) from error
        if response.status_code == 413:
            raise DataError(read_failure(response.content)[0])
        if response.status_code != 200:
            raise status_failure(response.status_code, response.headers, response.content, _TOKEN)
        try:
            return _RESULT.validate_json(response.content)
        except ValidationError as error:
            fault: Any = error.errors(include_url=False, include_input=False)[0]
            reason = f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}"
            raise RequestFailedError(f"its answer is not a result of a run: {reason}", lasting=True) from None


def remote_sandbox(urls: Sequence[str]) -> RemoteSandbox:
    """The sandbox behind these code servers, with the token of CODE_SERVER_TOKEN.

    Raises:
        ConfigError: An address or the token is wrong.
    """
    return RemoteSandbox(urls, token=environment_key(_TOKEN))
