"""Sandboxes on other machines: a program goes to the least busy code server, and to the next one if that fails.

The code tool sends one JSON object, a :class:`RunRequest`, and the code server answers with a ``RunResult``.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import httpx
from pydantic import Field, TypeAdapter, ValidationError

from afm.configuration import Settings
from afm.endpoints.connections import Replicas, environment_key, server_address
from afm.endpoints.pace import pause_s
from afm.errors import ConfigError, DataError, SandboxError, first_fault
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
    """Fields of :class:`SandboxLimits`. The others get their default, or the server's maximum if that is lower."""


def result_body(result: RunResult) -> bytes:
    """Return a result as JSON."""
    return _RESULT.dump_json(result)


_CONNECT_TIMEOUT_S = 5.0
_TOKEN = "CODE_SERVER_TOKEN"
_EXAMPLE = "http://127.0.0.1:9002"


class RemoteSandbox:
    """A sandbox (:class:`afm.sandbox.Sandbox`) made of code servers.

    A program whose connection breaks is sent to another server and may run twice. This is safe because programs in a
    sandbox have no effect outside.

    Args:
        urls: Code servers, such as ``http://node1:9002``.
        token: Sent only in the header ``Authorization``.
        rounds: Attempts with all servers before the run fails.
        busy_s: Seconds to keep asking servers that are healthy but full.
        queue_s: Longest wait in seconds beyond the run's ``wall_s``, for the server's queue and the transfer.

    Raises:
        ConfigError: There is no address, one is not ``http://`` or ``https://``, or the token does not fit in a header.
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
            SandboxError: No server could run it. The message lists their answers.
        """
        limits = limits or SandboxLimits()
        # Lone surrogates, which JSON cannot hold, become question marks as in a local sandbox.
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
            reason = f"its answer is not the result of a run: {first_fault(error, 'body')}"
            raise RequestFailedError(reason, lasting=True) from None


def remote_sandbox(urls: Sequence[str]) -> RemoteSandbox:
    """Return the sandbox of these code servers, with the token in CODE_SERVER_TOKEN.

    Raises:
        ConfigError: An address or the token is invalid.
    """
    return RemoteSandbox(urls, token=environment_key(_TOKEN))
