"""Processes that start together, are watched, and end together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx

from afm.cli.serving.engines import Server
from afm.errors import ConfigError, EngineError
from afm.processes import die_with_parent

_LOOK_S = 0.5
_HEALTH_S = 5.0
_FINISH_S = 20.0
_SHOWN_LINES = 15


class StoppedError(Exception):
    """A signal asked for the end.

    Attributes:
        number: Which.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def serve_together(servers: Sequence[Server], logs: Path, start_s: float, ready: Callable[[], None]) -> None:
    """Start all, call ``ready`` once each is healthy, and watch them; when one ends, all are ended.

    Args:
        logs: Folder of ``PORT.log`` files.
        start_s: For all to become healthy.

    Raises:
        ConfigError: A port is taken.
        EngineError: One ended, or did not become healthy; says what it wrote last.
        StoppedError: SIGINT or SIGTERM came.
    """
    for server in servers:
        _check_free(server)
    logs.mkdir(parents=True, exist_ok=True)
    started: list[subprocess.Popen[bytes]] = []
    with _signals_raise():
        try:
            for server in servers:
                started.append(_start(server, logs))  # noqa: PERF401 - what has started must be ended
            _wait_healthy(servers, started, logs, start_s)
            ready()
            while True:
                _check_alive(servers, started, logs)
                time.sleep(_LOOK_S)
        finally:
            _end(started)


def _start(server: Server, logs: Path) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C reaches this process only, which then ends them with all their children.
    with _log(server, logs).open("wb") as log:
        return subprocess.Popen(
            server.command,
            env=os.environ | server.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def _wait_healthy(
    servers: Sequence[Server], started: Sequence[subprocess.Popen[bytes]], logs: Path, start_s: float
) -> None:
    until = time.monotonic() + start_s
    waiting = list(servers)
    while waiting:
        _check_alive(servers, started, logs)
        waiting = [server for server in waiting if not _healthy(server)]
        if waiting and time.monotonic() > until:
            told = f"{waiting[0].url} is not healthy after {start_s:g} s"
            raise EngineError(f"{told}{_last_words(waiting[0], logs)}\nmore time: --start-s")
        if waiting:
            time.sleep(_LOOK_S)


def _check_alive(servers: Sequence[Server], started: Sequence[subprocess.Popen[bytes]], logs: Path) -> None:
    for server, process in zip(servers, started, strict=True):
        if (status := process.poll()) is not None:
            raise EngineError(
                f"the server at {server.url} ended with status {status}{_last_words(server, logs)}"
            )


def _healthy(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", timeout=_HEALTH_S, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask all to end, and make those that do not."""
    for number, patience_s in ((signal.SIGTERM, _FINISH_S), (signal.SIGKILL, _FINISH_S)):
        for process in started:
            # The leader may be gone while its children are not.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        until = time.monotonic() + patience_s
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))


@contextmanager
def _signals_raise() -> Iterator[None]:
    def stop(number: int, _: FrameType | None) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)  # the end is under way
        raise StoppedError(number)

    before = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _check_free(server: Server) -> None:
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        socket.create_server((server.host, server.port), family=family).close()
    except OSError as error:
        raise ConfigError(
            f"port {server.port} of {server.host} cannot be used: {error.strerror or error}; choose another with --port"
        ) from None


def _log(server: Server, logs: Path) -> Path:
    return logs / f"{server.port}.log"


def _last_words(server: Server, logs: Path) -> str:
    lines = _log(server, logs).read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
    return "".join(f"\n  {line}" for line in [f"last lines of {_log(server, logs)}:", *lines])
