"""Many sessions over HTTP, on a loopback port or a Unix socket, inside a program of asyncio.

| request below ``/s/KEY/v1``, or below ``/v1`` with ``Authorization: Bearer KEY`` | answer |
|---|---|
| ``POST chat/completions`` | as OpenAI's |
| ``POST reward`` with ``{"reward": NUMBER}`` | ends the session; :attr:`Session.reward` has the number |
| ``GET models`` | the session's one model |

Errors have the form that OpenAI's clients read. None has a status that they try again, but for a failure of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, unquote

from pydantic import BaseModel, ValidationError

from afm.errors import DataError, EngineError, MissingExtraError
from afm.harness.chat_api import ChatBody
from afm.harness.history import Sampled
from afm.harness.requests import ModelReply, RequestRefusedError
from afm.harness.sessions import Session

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_PATH = re.compile(r"/(?:s/(?P<key>[^/]+)/)?(?:v1/)?(?P<path>[a-z/_]+)\Z")
_MAX_BODY_BYTES = 64 << 20
_BACKLOG = 2048
_JSON = [(b"content-type", b"application/json")]


class HarnessApp:
    """The sessions of one process as an ASGI application."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self._posts: dict[str, Callable[[Session, bytes, Send], Awaitable[None]]] = {
            "chat/completions": self._chat,
            "reward": self._reward,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; a client that leaves ends its generations."""
        if scope["type"] != "http":
            return
        try:
            session, path = self._find(scope)
            if scope["method"] == "GET" and path == "models":
                await _answer(send, _models(session))
                return
            work = self._posts.get(path)
            if scope["method"] != "POST" or work is None:
                expected = ", ".join(f"POST {name}" for name in self._posts)
                raise RequestRefusedError(404, "path", f"{scope['method']} {path}: expected {expected}")
            body = await _body(receive)
            await _while_connected(receive, work(session, body, send))
        except RequestRefusedError as error:
            await _answer(send, _error(error.code, str(error)), error.status)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(map(str, problem["loc"])) or "body"
            await _answer(send, _error("request", f"{where}: {problem['msg']}"), 400)
        except DataError as error:
            await _answer(send, _error("request", error.message), 400)
        except EngineError as error:
            await _answer(send, _error("engine", str(error)), 502)

    def _find(self, scope: Scope) -> tuple[Session, str]:
        raw = scope["raw_path"].decode("latin-1")
        match = _PATH.match(raw)
        if match is None:
            raise RequestRefusedError(404, "path", f"{raw[:200]}: no such path; expected /s/KEY/v1/...")
        headers = dict(scope["headers"])
        bearer = headers.get(b"authorization", b"").decode("latin-1").partition(" ")[2]
        key = (
            unquote(match["key"])
            if match["key"]
            else bearer or headers.get(b"x-api-key", b"").decode("latin-1")
        )
        session = self.sessions.get(key)
        if session is None:
            raise RequestRefusedError(404, "session", "no session of this key; it may be over")
        return session, match["path"]

    async def _chat(self, session: Session, body: bytes, send: Send) -> None:
        asked = ChatBody.model_validate_json(body)
        reply = await session.ask(asked.request())
        await _answer(send, asked.answer(reply, _pieces(session, reply)))

    async def _reward(self, session: Session, body: bytes, send: Send) -> None:
        reward = _Verdict.model_validate_json(body).reward
        if not math.isfinite(reward):
            raise RequestRefusedError(400, "request", f"reward: got {reward}, expected a finite number")
        session.reward, session.ended = reward, True
        await _answer(send, {"reward": reward})


class HarnessServer:
    """A :class:`HarnessApp` that listens.

    Args:
        host: Where it listens; ``None`` for the Unix socket alone.
        port: 0 for a free one.
        unix_socket: A path to listen on as well; whoever may open it is let in, so its folder decides.

    Attributes:
        origin: ``http://HOST:PORT``, or ``http://localhost`` over the Unix socket alone.
    """

    def __init__(
        self, *, host: str | None = "127.0.0.1", port: int = 0, unix_socket: str | Path | None = None
    ) -> None:
        try:
            import uvicorn
        except ImportError:
            raise MissingExtraError("uvicorn", "servers") from None
        self.app = HarnessApp()
        self._sockets: list[socket.socket] = []
        self.origin = "http://localhost"
        if unix_socket is not None:
            listener = socket.socket(socket.AF_UNIX)
            Path(unix_socket).unlink(missing_ok=True)
            listener.bind(str(unix_socket))
            listener.listen(_BACKLOG)
            self._sockets.append(listener)
        if host is not None:
            listener = socket.create_server((host, port), backlog=_BACKLOG)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(listener)
            self.origin = f"http://{host}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            self.app,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=75,
        )
        self._server = uvicorn.Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *about: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Serve in the event loop of the caller; requests sent earlier are answered now."""
        # Signals belong to the program around it.
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        self._serving = asyncio.create_task(self._server.serve(sockets=self._sockets))

    async def close(self) -> None:
        """End all sessions and stop."""
        for session in [*self.app.sessions.values()]:
            await session.close()
        self.app.sessions.clear()
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        for listener in self._sockets:
            listener.close()

    def open(self, session: Session) -> str:
        """Serve a session; returns its base URL.

        Raises:
            ValueError: Another session has its key.
        """
        if session.key in self.app.sessions:
            raise ValueError(f"session {session.key!r} is open already; each needs a key of its own")
        self.app.sessions[session.key] = session
        return f"{self.origin}/s/{quote(session.key, safe='')}/v1"

    async def end(self, key: str) -> list[Sampled]:
        """Close a session, and forget it; its trajectories."""
        return await self.app.sessions.pop(key).close()


class _Verdict(BaseModel):
    reward: float


def _models(session: Session) -> dict[str, Any]:
    model = session.model
    row = {"id": model.name, "object": "model", "max_model_len": model.context_tokens}
    return {"object": "list", "data": [row]}


def _pieces(session: Session, reply: ModelReply) -> Mapping[int, str]:
    ids = {token for choice in reply.choices for token in choice.generation.token_ids}
    return {token: session.model.decode([token]) for token in ids}


def _error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": code}}


async def _answer(send: Send, content: Any, status: int = 200) -> None:
    body = json.dumps(content, ensure_ascii=False).encode("utf-8", "replace")
    headers = [*_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise asyncio.CancelledError
        body += event.get("body", b"")
        if len(body) > _MAX_BODY_BYTES:
            raise RequestRefusedError(413, "too_large", f"the request is longer than {_MAX_BODY_BYTES} bytes")
        if not event.get("more_body"):
            return bytes(body)


async def _while_connected(receive: Receive, work: Any) -> None:
    """Do the work, unless the client leaves."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
