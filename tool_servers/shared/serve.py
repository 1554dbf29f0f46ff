"""Running an application until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from afm.errors import ConfigError
from afm.processes import follow_parent
from tool_servers.shared.access import BrowserGuard
from tool_servers.shared.logs import follow_log

if TYPE_CHECKING:
    from starlette.types import ASGIApp

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
