"""Serve many sessions over HTTP on a loopback port or a Unix socket, inside an asyncio program.

| request below ``/s/KEY/v1``, or below ``/v1`` with ``Authorization: Bearer KEY`` | answer |
|---|---|
| ``POST chat/completions``, ``completions``, ``responses`` | in OpenAI's form |
| ``POST embeddings`` | forwarded to another server |
| ``POST messages`` | in Anthropic's form, with the base URL ``/s/KEY`` |
| ``POST reward`` with ``{"reward": NUMBER}`` | sets :attr:`Session.reward` and ends the session |
| ``GET models`` | the model of the session |

Each member of a team sends its requests below ``/s/KEY/agent/NAME/v1``.

Errors have the form of OpenAI's API. Clients retry only failures of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote, unquote
from uuid import uuid4

import httpx
from pydantic import BaseModel, FiniteFloat, ValidationError

from afm.endpoints.chat import EndpointSettings
from afm.endpoints.connections import Connections, base_url
from afm.errors import AfmError, EngineError, MissingExtraError, first_fault
from afm.harness.chat_api import AnswerStream, ChatBody, CompletionBody, event
from afm.harness.history import Sampled
from afm.harness.messages_api import MessagesBody
from afm.harness.requests import ModelReply, ModelRequest, RequestRefusedError
from afm.harness.responses_api import ResponsesBody
from afm.harness.sessions import OnReply, Session

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

_Body = ChatBody | CompletionBody | ResponsesBody | MessagesBody
_LOG = logging.getLogger(__name__)
_PATH = re.compile(r"/(?:s/(?P<key>[^/]+)/)?(?:agent/(?P<member>[^/]+)/)?(?:v1/)?(?P<path>[a-z/_]+)\Z")
_MAX_BODY_BYTES = 64 << 20
_BACKLOG = 2048
_JSON = [(b"content-type", b"application/json")]
_EVENTS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


class HarnessApp:
    """ASGI application for the sessions of one process.

    Args:
        embeddings: Address of an OpenAI-compatible server, to which requests for ``embeddings`` are forwarded unchanged.
            ``AFM_MODEL_API_KEY`` holds its key.
    """

    def __init__(self, embeddings: str | None = None) -> None:
        self.sessions: dict[str, Session] = {}
        self._stored: dict[tuple[str, str], ModelRequest] = {}
        """Conversations up to a reply, by session key and id of the reply."""
        self._bodies: dict[str, tuple[type[_Body], str]] = {
            "chat/completions": (ChatBody, "chatcmpl-"),
            "completions": (CompletionBody, "cmpl-"),
            "responses": (ResponsesBody, "resp_"),
            "messages": (MessagesBody, "msg_"),
        }
        self._paths = (*self._bodies, "embeddings", "reward")
        self._embeddings = embeddings
        self._connections: Connections | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. If the client disconnects, cancel its generations."""
        if scope["type"] != "http":
            return
        try:
            session, path, member = self._find(scope)
            if scope["method"] == "GET" and path == "models":
                await _answer(send, _models(session))
            elif scope["method"] != "POST" or path not in self._paths:
                expected = ", ".join(f"POST {name}" for name in self._paths)
                raise RequestRefusedError(404, "path", f"{scope['method']} {path}: expected {expected}")
            else:
                work = self._post(session, path, await _body(receive), send, member)
                await _while_connected(receive, work)
        except _GoneError:
            return
        except Exception as error:  # noqa: BLE001 - the border of a request: its client gets a reason for any failure
            await _answer(send, *_fault(error))

    def forget(self, key: str) -> Session:
        """Remove a session and return it."""
        for place in [place for place in self._stored if place[0] == key]:
            del self._stored[place]
        return self.sessions.pop(key)

    def _find(self, scope: Scope) -> tuple[Session, str, str]:
        raw = scope["raw_path"].decode("latin-1")
        match = _PATH.match(raw)
        if match is None:
            raise RequestRefusedError(404, "path", f"unknown path {raw[:200]}; expected /s/KEY/v1/...")
        headers = dict(scope["headers"])
        bearer = headers.get(b"authorization", b"").decode("latin-1").partition(" ")[2]
        key = unquote(match["key"] or "") or bearer or headers.get(b"x-api-key", b"").decode("latin-1")
        session = self.sessions.get(key)
        if session is None:
            raise RequestRefusedError(404, "session", "no session has this key; it may have ended")
        return session, match["path"], unquote(match["member"] or "")

    async def _post(self, session: Session, path: str, body: bytes, send: Send, member: str) -> None:
        if path == "reward":
            session.reward, session.ended = _Verdict.model_validate_json(body).reward, True
            await _answer(send, {"reward": session.reward})
            return
        if path == "embeddings":
            await self._pass_on(body, send)
            return
        kind, prefix = self._bodies[path]
        asked = kind.model_validate_json(body)
        if asked.continues is not None:
            asked.after(self._earlier(session, path, asked.continues))
        request = replace(asked.request(), member=member)
        identity = f"{prefix}{uuid4().hex}"
        decode, answers = session.model.decode, list[bytes]()

        def write(reply: ModelReply) -> None:
            answers.append(json.dumps(asked.answer(identity, reply, decode)).encode())

        if asked.stream:
            events = asked.events(identity, session.model.name, decode)
            reply = await _streamed(session, request, events, send, write)
        else:
            reply = await session.ask(request, on_reply=write)
            await _answer(send, answers[0])
        if reply is not None and (kept := asked.kept(request, reply)) is not None:
            self._stored[session.key, identity] = kept

    async def _pass_on(self, body: bytes, send: Send) -> None:
        if self._embeddings is None:
            message = "embeddings: this gateway has no server for them; start it with embeddings=URL"
            raise RequestRefusedError(404, "embeddings", message)
        if self._connections is None:
            key = EndpointSettings().key()
            self._connections = Connections(64, key=key, headers={"Content-Type": "application/json"})
        try:
            async with self._connections.place() as client:
                answer = await client.post(f"{base_url(self._embeddings)}/embeddings", content=body)
        except httpx.HTTPError as error:
            raise EngineError(f"embeddings: {type(error).__name__}: {error}") from error
        await _answer(send, answer.content, answer.status_code)

    async def close(self) -> None:
        """End all sessions and close the connections."""
        for key in [*self.sessions]:
            await self.forget(key).close()
        if self._connections is not None:
            await self._connections.close()

    def _earlier(self, session: Session, path: str, identity: str) -> ModelRequest:
        try:
            return self._stored[session.key, identity]
        except KeyError:
            # After this code, Anthropic's client sends its whole history in a new thread.
            lost = (404, "thread_not_found") if path == "messages" else (400, "previous_response_id")
            raise RequestRefusedError(*lost, f"no stored response {identity[:80]!r}") from None


async def stream_answer(
    session: Session, request: ModelRequest, events: AnswerStream, receive: Receive, send: Send
) -> None:
    """Stream the answer to a request outside :class:`HarnessApp`. If the client disconnects, cancel its generation."""
    try:
        await _while_connected(receive, _streamed(session, request, events, send))
    except _GoneError:
        return
    except (RequestRefusedError, EngineError) as error:
        fault, status = _fault(error)
        await _answer(send, fault, 503 if status == 502 else status)


async def _streamed(
    session: Session, request: ModelRequest, events: AnswerStream, send: Send, on_reply: OnReply | None = None
) -> ModelReply | None:
    """Answer with server-sent events. A failure before the first event has its own HTTP status."""
    pieces: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
    work = asyncio.ensure_future(session.ask(request, lambda *piece: pieces.put_nowait(piece), on_reply))
    work.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        piece = await pieces.get()
        if piece is None:
            work.result()
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        begun = events.begin()
        while piece is not None:
            written, begun = begun + events.text(*piece), b""
            while not pieces.empty() and (piece := pieces.get_nowait()) is not None:
                written += events.text(*piece)
            await _send_piece(send, written)
            if piece is not None:
                piece = await pieces.get()
        try:
            reply = work.result()
        except Exception as error:  # noqa: BLE001 - the answer has begun, so the stream names the failure
            await _send_piece(send, event(_fault(error)[0], "error"), more=False)
            return None
        await _send_piece(send, begun + events.end(reply), more=False)
        return reply
    finally:
        work.cancel()


async def _send_piece(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


class HarnessServer:
    """Server of a :class:`HarnessApp`.

    Args:
        host: Address to listen on. ``None`` for only the Unix socket.
        port: Port to listen on. 0 for a free one.
        embeddings: As for :class:`HarnessApp`.
        unix_socket: Path of a Unix socket to listen on. The permissions of its folder control access.

    Attributes:
        origin: ``http://HOST:PORT``, or ``http://localhost`` with only the Unix socket.
    """

    def __init__(
        self,
        *,
        host: str | None = "127.0.0.1",
        port: int = 0,
        unix_socket: str | Path | None = None,
        embeddings: str | None = None,
    ) -> None:
        try:
            import uvicorn
        except ImportError:
            raise MissingExtraError("uvicorn", "servers") from None
        self.app = HarnessApp(embeddings)
        self._sockets: list[socket.socket] = []
        self.origin = "http://localhost"
        if unix_socket is not None:
            self._sockets.append(_unix_listener(Path(unix_socket)))
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
            proxy_headers=False,
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
        """Start to serve in the caller's event loop. Requests that arrived earlier are answered now."""
        # The surrounding program handles signals.
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        self._serving = asyncio.create_task(self._server.serve(sockets=self._sockets))

    async def close(self) -> None:
        """End all sessions and stop the server."""
        await self.app.close()
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        for listener in self._sockets:
            listener.close()

    def open(self, session: Session) -> str:
        """Serve a session and return its base URL.

        Raises:
            ValueError: Another open session has the same key.
        """
        if session.key in self.app.sessions:
            raise ValueError(f"session {session.key!r} is already open; expected a new key for each session")
        self.app.sessions[session.key] = session
        return f"{self.origin}/s/{quote(session.key, safe='')}/v1"

    async def end(self, key: str) -> list[Sampled]:
        """Close and remove a session. Return its trajectories."""
        return await self.app.forget(key).close()


def _unix_listener(path: Path) -> socket.socket:
    """Listen at a path of any length. The kernel's limit is 107 bytes, so a descriptor replaces the folder's path."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    listener.listen(_BACKLOG)
    return listener


class _GoneError(Exception):
    """The client has disconnected."""


class _Verdict(BaseModel):
    reward: FiniteFloat


def _models(session: Session) -> dict[str, Any]:
    model = session.model
    row = {"id": model.name, "object": "model", "max_model_len": model.context_tokens}
    return {"object": "list", "data": [row]}


def _fault(error: Exception) -> tuple[dict[str, Any], int]:
    """Return the answer to a request that failed, and its status. What an unexpected error says goes only to the log."""
    match error:
        case RequestRefusedError():
            return _error(error.code, str(error)), error.status
        case ValidationError():
            return _error("request", first_fault(error, "body")), 400
        case EngineError():
            return _error("engine", str(error)), 502
        case AfmError():
            return _error("request", str(error)), 400
    _LOG.error("a request failed", exc_info=error)
    return _error("internal", f"the gateway failed ({type(error).__name__}); its log has the reason"), 500


def _error(code: str, message: str) -> dict[str, Any]:
    """Return an error in a form that clients of OpenAI and of Anthropic read."""
    fault = {"message": message, "type": "invalid_request_error", "code": code}
    return {"type": "error", "error": {**fault, "details": {"error_code": code}}}


async def _answer(send: Send, content: Any, status: int = 200) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = [*_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise _GoneError
        body += event.get("body", b"")
        if len(body) > _MAX_BODY_BYTES:
            raise RequestRefusedError(413, "too_large", f"expected at most {_MAX_BODY_BYTES} bytes")
        if not event.get("more_body"):
            return bytes(body)


async def _while_connected(receive: Receive, work: Any) -> None:
    """Await the work. If the client disconnects, cancel it.

    Raises:
        _GoneError: The client has disconnected.
    """
    task, watcher = asyncio.current_task(), asyncio.ensure_future(receive())
    working = True
    assert task is not None, "a request is served in a task"

    def leave(event: asyncio.Future[Any]) -> None:
        if working and not event.cancelled():
            task.cancel()

    watcher.add_done_callback(leave)
    try:
        await work
    except asyncio.CancelledError:
        if watcher.done() and not task.uncancel():
            raise _GoneError from None
        raise
    finally:
        working = False
        watcher.cancel()
