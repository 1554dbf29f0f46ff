"""Running an application until it is told to stop, and rotating the log file of its process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from afm.errors import ConfigError
from afm.processes import follow_parent
from tool_servers.shared.access import BrowserGuard

if TYPE_CHECKING:
    from starlette.types import ASGIApp


LOG_VARIABLE = "AFM_SERVER_LOG"
"""``BYTES:PATH``, set by whoever sent standard output and errors of this process to ``PATH``."""

_KEPT = 3
_LOOK_S = 1.0


def follow_log() -> None:
    """Keep the file that :data:`LOG_VARIABLE` names below its size; nothing to do without it."""
    told = os.environ.pop(LOG_VARIABLE, None)
    if told is None:
        return
    most, _, path = told.partition(":")
    threading.Thread(target=_followed, args=(Path(path), int(most)), name="log", daemon=True).start()


def _followed(path: Path, max_bytes: int) -> None:
    while True:
        time.sleep(_LOOK_S)
        if os.fstat(1).st_size > max_bytes:
            renewed(path)


def renewed(path: Path) -> None:
    """Number the old files, ``path.1`` being the youngest, and go on in a new one."""
    try:
        for number in range(_KEPT, 1, -1):
            older = path.with_name(f"{path.name}.{number - 1}")
            if older.exists():
                older.replace(path.with_name(f"{path.name}.{number}"))
        path.replace(path.with_name(f"{path.name}.1"))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        print(f"log {path}: cannot be renewed: {error}", file=sys.stderr)
        return
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


_BACKLOG = 2048
_HEAD_S = 15.0
_MOST_CONNECTIONS = 4096


def serve(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    token: str | None,
    finish_s: float,
    prepare: Callable[[], Awaitable[None]] | None = None,
    head_s: float = _HEAD_S,
    most_connections: int = _MOST_CONNECTIONS,
) -> None:
    """Listen until SIGTERM or Ctrl-C; then finish what is under way, for at most ``finish_s``, and return.

    One line on standard output says where it listens. Nothing that a request contains is logged.

    Args:
        port: 0 takes a free one.
        token: What the application asks of requests; without one, pages in a browser are kept out by their names.
        head_s: For the head of a request, from the connection on; then status 408.
        most_connections: Beyond them the one that has longest been without a request is closed.
        prepare: Runs before the first request, in the same event loop; what it raises ends the server.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    import uvicorn

    from tool_servers.shared.connections import bounded

    follow_parent()
    follow_log()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    listener = _listener(host, port)
    config = uvicorn.Config(
        BrowserGuard(app, token),
        http=bounded(head_s, most_connections),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(finish_s)),
        timeout_keep_alive=75,
    )
    name = f"[{host}]" if ":" in host else host

    async def run() -> None:
        if prepare is not None:
            await prepare()
        # The server handles these signals itself and sends them again when it is done; then they are old news.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        print(f"listening on http://{name}:{listener.getsockname()[1]}", flush=True)
        await uvicorn.Server(config).serve(sockets=[listener])

    with listener:
        asyncio.run(run())


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from None
    # asyncio sets this only on sockets that name their protocol, which these do not; without it every answer waits
    # 40 ms for the client's acknowledgement of its head. Connections inherit it.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
