"""An application behind a real HTTP server on this machine."""

import os
import socket
import threading
from typing import Any, Self

import uvicorn

OWN_HOST = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}.7"
"""A loopback address that no other process uses.

On 127.0.0.1, outgoing connections can take a free port before the server binds it.
"""


def free_port() -> int:
    """Return a port of :data:`OWN_HOST` that stays free until this process or its server binds it."""
    with socket.create_server((OWN_HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class LoopbackServer:
    """Serves in a thread between :meth:`start` and :meth:`stop`, on a free port.

    Args:
        app: ASGI application, or a complete configuration of uvicorn.
        config: Settings of uvicorn.

    Attributes:
        port: Port, which accepts connections from the beginning, so that no other process can take it.
        origin: ``http://127.0.0.1:PORT``.
    """

    def __init__(self, app: Any, **config: Any) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port: int = self._listener.getsockname()[1]
        self.origin = f"http://127.0.0.1:{self.port}"
        whole = isinstance(app, uvicorn.Config)
        self._server = uvicorn.Server(
            app if whole else uvicorn.Config(app, **{"log_level": "warning", **config})
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})

    def start(self) -> Self:
        """Start serving; answers requests that were sent earlier, too."""
        self._thread.start()
        return self

    def stop(self, *, forced: bool = False) -> None:
        """Stop; ``forced`` does not wait for running requests."""
        self._server.force_exit = forced
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not end"
        self._listener.close()
