"""The gateway's HTTP interface: OpenAI's paths, in front of any endpoint that speaks them.

| request | answer |
|---|---|
| ``POST /v1/chat/completions``, ``POST /v1/completions`` | the endpoint's, streamed or not; the call stands in the log |
| ``GET /v1/models``, ``GET /v1/models/ID`` | the endpoint's |
| ``GET /health`` | 200, 503 when the log cannot be written; needs no token |
| ``GET /metrics`` | numbers for Prometheus |

The first two also below ``/task/ID`` and ``/task/ID/agent/NAME`` (see :func:`label_of`). What the endpoint
answers, errors included, is passed on as it is. The endpoint is asked only when the log has room for the call (503 otherwise). Errors of the gateway's own are ``{"error": {"message", "type": "gateway_error", "code"}}``.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote, unquote

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from afm.distill.gateway import CallLog, Label, message_text
from afm.errors import DataError
from tool_servers.gateway.exchange import Asked, Blackout, Desk, Exchange, UnloggedError, refusal, room_for
from tool_servers.gateway.settings import GatewaySettings, ServedEndpoint
from tool_servers.shared.access import allowed
from tool_servers.shared.admission import Admission
from tool_servers.shared.metrics import CONTENT_TYPE, Count, Gauge, page
from tool_servers.shared.requests import GoneError, TooLargeError, bounded_body

_SUFFIX = re.compile(r"^(?P<key>.*?)(?::(?P<names>(?:task|agent|attempt)=.*))?$", re.DOTALL)
_NAMES = ("task", "agent", "attempt")
_HIDDEN = re.compile(r"[\x00-\x1f\x7f]")


def key_and_names(authorization: str) -> tuple[str, dict[str, str]]:
    """The key of an ``Authorization`` header without the names behind it, and these.

    Raises:
        DataError: They are not of the form ``task=ID,agent=NAME``.
    """
    given = authorization.partition(" ")[2] if authorization[:7].lower() == "bearer " else ""
    found = _SUFFIX.match(given)
    if found is None or found["names"] is None:
        return given, {}
    names: dict[str, str] = {}
    for part in found["names"].split(","):
        name, equals, value = part.partition("=")
        if not equals or name not in _NAMES:
            raise DataError(
                f"API key: got {part[:40]!r} behind it, expected task=ID,agent=NAME,attempt=NUMBER; write other signs of "
                "a value as %2C and the like"
            )
        names[name] = unquote(value)
    return found["key"], names


def label_of(
    headers: Mapping[str, str], in_path: Mapping[str, str], in_key: Mapping[str, str], body: Mapping[str, Any]
) -> Label:
    """The label of a request; one that names no task gets one made of its first words.

    | form | where |
    |---|---|
    | base URL | ``http://HOST:PORT/task/ID/agent/NAME/v1`` (``/agent/NAME`` may be absent) |
    | headers | ``X-AFM-Task``, ``X-AFM-Agent``, ``X-AFM-Attempt`` |
    | API key | ``KEY:task=ID,agent=NAME,attempt=2`` |

    Values are percent-decoded in all three. The earlier form wins, name by name.

    Raises:
        DataError: A name is too long or holds control characters, or the attempt is no number.
    """
    in_headers = {name: unquote(headers.get(f"x-afm-{name}", "")) for name in _NAMES}
    told = {
        name: in_path.get(name) or in_headers[name] or in_key.get(name, "")
        for name in _NAMES
        if in_path.get(name) or in_headers[name] or in_key.get(name)
    }
    told.setdefault("task", _task_by_words(body))
    try:
        label = Label.model_validate(told)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise DataError(f"{first['loc'][0]}: {first['msg']}") from None
    if _HIDDEN.search(label.task + label.agent):
        raise DataError("task or agent: got control characters, expected a name")
    return label


def _task_by_words(body: Mapping[str, Any]) -> str:
    """The same for all calls of one conversation: its first message of the user decides."""
    messages = body.get("messages")
    first = ""
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        said = (item for item in messages if isinstance(item, Mapping) and item.get("role") == "user")
        first = message_text(next(said, {}))
    words = first or str(body.get("prompt", ""))
    return "auto-" + hashlib.sha256(words.encode("utf-8", "surrogatepass")).hexdigest()[:12]


_BODY_S = 60.0
_CONNECT_S = 10.0
_MODELS_S = 30.0
_GONE = 499  # nobody reads it
_PATHS = ("chat/completions", "completions")
_PREFIXES = ("", "/task/{task}", "/task/{task}/agent/{agent}")


class Gateway:
    """Passes calls on and writes them down.

    Args:
        routes: The first that serves a model is asked.
        log: Where calls are written; open.
        token: First part of the key that clients must send; ``None`` takes any.
    """

    def __init__(
        self, settings: GatewaySettings, routes: list[ServedEndpoint], log: CallLog, token: str | None
    ) -> None:
        self._settings, self._routes, self._token = settings, routes, token
        self._log = log
        self._calls = Count(
            "afm_gateway_calls_total", "Calls, by 200 or what went wrong.", "outcome", ("200",)
        )
        self._admission = Admission(settings.max_parallel, settings.max_waiting, settings.max_wait_s)
        self._desk: Desk | None = None

    def app(self) -> FastAPI:
        """The application."""
        app = FastAPI(lifespan=self._life, docs_url=None, redoc_url=None, openapi_url=None)
        app.add_exception_handler(HTTPException, _unknown)
        for prefix in _PREFIXES:
            for path in _PATHS:
                app.post(f"{prefix}/v1/{path}")(self.call)
            app.get(f"{prefix}/v1/models")(self.models)
            app.get(f"{prefix}/v1/models/{{model:path}}")(self.models)
        app.get("/health")(self.health)
        app.get("/metrics")(self.metrics)
        return app

    async def call(self, request: Request) -> Response:
        """Pass one call on."""
        try:
            key, in_key = key_and_names(request.headers.get("authorization", ""))
            if not self._allowed(key):
                return self._no_token()
            content = await bounded_body(request, self._settings.max_request_bytes, _BODY_S)
            asked = self._asked(request, content)
            label = label_of(request.headers, request.path_params, in_key, asked.body)
        except DataError as error:
            return self._refused(400, "label", error.message)
        except TooLargeError as error:
            return self._refused(413, "too_large", str(error))
        except TimeoutError:
            return self._refused(408, "slow", f"the request did not arrive within {_BODY_S:g} s")
        except GoneError:
            return self._refused(_GONE, "gone", "the client has left")
        route = self._route(asked.model)
        if route is None:
            return self._refused(404, "model", f"no endpoint is set up for the model {asked.model[:100]!r}")
        assert self._desk is not None
        return Exchange(self._desk, route, label, asked)

    async def models(self, request: Request) -> Response:
        """The models of all endpoints, or what one endpoint says of one model."""
        if not self._allowed(key_and_names(request.headers.get("authorization", ""))[0]):
            return self._no_token()
        model = request.path_params.get("model")
        if model is not None:
            route = self._route(model)
            path = _path_of(model)
            told = None if route is None or path is None else await self._listed(route, path)
            return told or refusal(404, "model", f"no endpoint knows the model {model[:100]!r}")
        answers = await asyncio.gather(*(self._listed(route, "") for route in self._routes))
        return _joined([answer for answer in answers if answer is not None])

    async def health(self) -> Response:
        """Whether calls are taken, and how busy the server is."""
        busy = {"running": self._admission.running, "waiting": self._admission.waiting}
        try:
            with room_for(self._log, 0):
                return JSONResponse({"status": "ok", **busy})
        except UnloggedError as error:
            return JSONResponse({"status": "failing", "error": str(error), **busy}, status_code=503)

    async def metrics(self, request: Request) -> Response:
        """Numbers for Prometheus."""
        if not self._allowed(key_and_names(request.headers.get("authorization", ""))[0]):
            return self._no_token()
        levels = (
            Gauge("afm_gateway_running", "Calls at work now.", lambda: self._admission.running),
            Gauge("afm_gateway_waiting", "Calls waiting now.", lambda: self._admission.waiting),
        )
        return PlainTextResponse(page((self._calls, *levels)), media_type=CONTENT_TYPE)

    def _asked(self, request: Request, content: bytes) -> Asked:
        """What a request asks for; a body that is no JSON object goes on as it is, the endpoint will say so."""
        path = "chat/completions" if request.url.path.endswith("/chat/completions") else "completions"
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            body = {}
        if not isinstance(body, dict):
            body = {}
        asked: Any = body.get("stream_options")
        wants = isinstance(asked, dict) and bool(asked.get("include_usage"))
        hide = self._settings.ask_usage and body.get("stream") is True and not wants
        if hide:
            options = {**(asked if isinstance(asked, dict) else {}), "include_usage": True}
            content = json.dumps({**body, "stream_options": options}).encode()
        return Asked(path, content, body, hide_usage=hide)

    def _route(self, model: str) -> ServedEndpoint | None:
        return next((route for route in self._routes if route.serves(model)), None)

    async def _listed(self, route: ServedEndpoint, path: str) -> Response | None:
        assert self._desk is not None
        headers = {"Authorization": f"Bearer {route.key}"} if route.key else {}
        try:
            answer = await self._desk.client.get(
                f"{route.url}/models{path}", headers=headers, timeout=_MODELS_S
            )
        except httpx.HTTPError:
            return None
        try:
            listed = json.loads(Blackout(route.key).whole(answer.content))
        except ValueError:
            status = 502 if answer.is_success else answer.status_code
            return refusal(
                status, "models", f"the endpoint's answer is no list of models (status {answer.status_code})"
            )
        return JSONResponse(listed, status_code=answer.status_code)

    def _allowed(self, key: str) -> bool:
        return allowed({"authorization": f"Bearer {key}"}, self._token)

    def _no_token(self) -> JSONResponse:
        message = (
            "the API key is missing or wrong; expected GATEWAY_TOKEN, or GATEWAY_TOKEN:task=ID,agent=NAME"
        )
        return self._refused(401, "token", message)

    def _refused(self, status: int, code: str, message: str) -> JSONResponse:
        self._calls.add(str(status))
        return refusal(status, code, message)

    @asynccontextmanager
    async def _life(self, _: FastAPI) -> AsyncIterator[None]:
        # Every call that finishes without an end that the client accepts is told by uvicorn; the log has it already.
        logging.getLogger("uvicorn.error").addFilter(_told_by_us)
        most = httpx.Limits(max_connections=None, max_keepalive_connections=self._settings.max_parallel)
        patience = httpx.Timeout(None, connect=_CONNECT_S, write=_BODY_S)  # reading is timed by the exchange
        async with httpx.AsyncClient(limits=most, timeout=patience) as client:
            self._desk = Desk(self._settings, client, self._log, self._admission, self._calls.add)
            yield


def _told_by_us(record: logging.LogRecord) -> bool:
    return "without completing response" not in record.getMessage()


def _path_of(model: str) -> str | None:
    """Where an endpoint tells of a model; ``None`` for what would lead elsewhere, where the key has no business."""
    if any(part in ("", ".", "..") for part in model.split("/")):
        return None
    return "/" + quote(model, safe="/:@")


def _joined(answers: list[Response]) -> Response:
    """One list of models; the answer itself when there is only one."""
    if len(answers) == 1:
        return answers[0]
    found: dict[str, Any] = {}
    for answer in answers:
        listed = json.loads(bytes(answer.body))
        data = listed.get("data") if isinstance(listed, dict) else None
        for model in data if isinstance(data, list) else ():
            if isinstance(model, dict):
                found.setdefault(str(model.get("id")), model)
    if not answers:
        return refusal(502, "connect", "no endpoint tells its models")
    return JSONResponse({"object": "list", "data": list(found.values())})


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = (
        f"{request.method} {request.url.path[:200]}: {error.detail}; recorded are {' and '.join(_PATHS)}"
    )
    return refusal(error.status_code, "path", message)
