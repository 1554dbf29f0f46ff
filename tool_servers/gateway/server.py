"""The gateway: OpenAI's paths in front of any endpoint that speaks them; every call is recorded.

| request | answer |
|---|---|
| ``POST /v1/chat/completions``, ``POST /v1/completions`` | the endpoint's, streamed or not; the call stands in the log |
| ``GET /v1/models``, ``GET /v1/models/ID`` | the endpoint's |
| ``GET /health`` | 200, 503 when the log cannot be written; needs no token |
| ``GET /metrics`` | numbers for Prometheus |

The first two also below ``/task/ID`` and ``/task/ID/agent/NAME`` (see :func:`label_of`). What the endpoint
answers, errors included, is passed on as it is. The endpoint is asked only when the log has room for the
call (503 otherwise). Errors of the gateway's own are ``{"error": {"message", "type": "gateway_error", "code"}}``.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import httpx
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from afm.distill.model_calls import CallLog, Label, message_text
from afm.endpoints.connections import HttpClients
from afm.errors import DataError
from tool_servers.gateway.exchange import (
    Blackout,
    Desk,
    Exchange,
    GatewayCall,
    UnloggedError,
    error_body,
    error_response,
    room_for,
)
from tool_servers.gateway.settings import GatewaySettings, UpstreamRoute, open_routes
from tool_servers.shared.command import Launch, NotSetUpError
from tool_servers.shared.endpoint import Endpoint, RefusalError, explained
from tool_servers.shared.serve import ServedApp

_LOG = Path("runs/gateway/events.jsonl")
_SUFFIX = re.compile(r"^(?P<key>.*?)(?::(?P<names>(?:task|agent|attempt)=.*))?$", re.DOTALL)
_NAMES = ("task", "agent", "attempt")
_HIDDEN = re.compile(r"[\x00-\x1f\x7f]")
_BODY_S = 60.0
_CONNECT_S = 10.0
_MODELS_S = 30.0
_PATHS = ("chat/completions", "completions")
_PREFIXES = ("", "/task/{task}", "/task/{task}/agent/{agent}")


def key_and_names(authorization: str) -> tuple[str, dict[str, str]]:
    """The key of an ``Authorization`` header without the names behind it, and these.

    Raises:
        DataError: They are not of the form ``task=ID,agent=NAME``.
    """
    credentials = authorization.partition(" ")[2] if authorization[:7].lower() == "bearer " else ""
    parts = _SUFFIX.match(credentials)
    if parts is None or parts["names"] is None:
        return credentials, {}
    names: dict[str, str] = {}
    for part in parts["names"].split(","):
        name, equals, value = part.partition("=")
        if not equals or name not in _NAMES:
            raise DataError(
                f"API key: got {part[:40]!r} behind it, expected task=ID,agent=NAME,attempt=NUMBER; write other signs of "
                "a value as %2C and the like"
            )
        names[name] = unquote(value)
    return parts["key"], names


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
    names = {
        name: in_path.get(name) or in_headers[name] or in_key.get(name, "")
        for name in _NAMES
        if in_path.get(name) or in_headers[name] or in_key.get(name)
    }
    names.setdefault("task", _task_by_words(body))
    try:
        label = Label.model_validate(names)
    except ValidationError as error:
        raise DataError(explained(error)) from None
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


class _GatewayEndpoint(Endpoint):
    no_key = "the API key is missing or wrong; expected GATEWAY_TOKEN, or GATEWAY_TOKEN:task=ID,agent=NAME"
    advice = f"; recorded are {' and '.join(_PATHS)}"

    def allows(self, headers: Mapping[str, str]) -> bool:
        key, _ = key_and_names(headers.get("authorization", ""))
        return super().allows({"authorization": f"Bearer {key}"})

    def error_body(self, refusal: RefusalError) -> dict[str, Any]:
        return error_body(refusal)


class Gateway:
    """Passes calls on and writes them down.

    Args:
        routes: The first that serves a model is asked.
        log: Where calls are written; open while it serves.
        token: First part of the key that clients must send; ``None`` takes any.
    """

    def __init__(
        self, settings: GatewaySettings, routes: list[UpstreamRoute], log: CallLog, token: str | None
    ) -> None:
        self._settings, self._routes, self._log = settings, routes, log
        self._endpoint = _GatewayEndpoint(
            "gateway", settings, token=token, max_bytes=settings.max_request_bytes, body_s=_BODY_S
        )
        self._desk: Desk | None = None

    def app(self) -> Starlette:
        """The application."""
        routes = []
        for prefix in _PREFIXES:
            routes += [Route(f"{prefix}/v1/{path}", self._call, methods=["POST"]) for path in _PATHS]
            routes.append(self._endpoint.get(f"{prefix}/v1/models", self._models))
            routes.append(self._endpoint.get(f"{prefix}/v1/models/{{model:path}}", self._models))
        return self._endpoint.app(*routes, life=self._life, trouble=self._log_trouble)

    async def _call(self, request: Request) -> Response:
        """Pass one call on."""
        endpoint = self._endpoint
        try:
            endpoint.check_key(request)
            _, in_key = key_and_names(request.headers.get("authorization", ""))
            call = self._read(request, await endpoint.body(request))
            label = label_of(request.headers, request.path_params, in_key, call.body)
        except DataError as error:
            return endpoint.refuse(RefusalError(400, "label", error.message))
        except RefusalError as refusal:
            return endpoint.refuse(refusal)
        route = self._route(call.model)
        if route is None:
            message = f"no endpoint is set up for the model {call.model[:100]!r}"
            return endpoint.refuse(RefusalError(404, "model", message))
        assert self._desk is not None
        return Exchange(self._desk, route, label, call)

    async def _models(self, request: Request) -> Response:
        """The models of all endpoints, or what one endpoint says of one model."""
        model = request.path_params.get("model")
        if model is not None:
            route = self._route(model)
            path = _path_of(model)
            answer = None if route is None or path is None else await self._listed(route, path)
            return answer or error_response(404, "model", f"no endpoint knows the model {model[:100]!r}")
        answers = await asyncio.gather(*(self._listed(route, "") for route in self._routes))
        return _joined([answer for answer in answers if answer is not None])

    async def _log_trouble(self) -> str:
        try:
            with room_for(self._log, 0):
                return ""
        except UnloggedError as error:
            return str(error)

    def _read(self, request: Request, content: bytes) -> GatewayCall:
        """What a request asks for; a body that is no JSON object passes unchanged, and the endpoint rejects it."""
        path = "chat/completions" if request.url.path.endswith("/chat/completions") else "completions"
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            body = {}
        if not isinstance(body, dict):
            body = {}
        options: Any = body.get("stream_options")
        wants = isinstance(options, dict) and bool(options.get("include_usage"))
        hide = self._settings.ask_usage and body.get("stream") is True and not wants
        if hide:
            options = {**(options if isinstance(options, dict) else {}), "include_usage": True}
            content = json.dumps({**body, "stream_options": options}).encode()
        return GatewayCall(path, content, body, hide_usage=hide)

    def _route(self, model: str) -> UpstreamRoute | None:
        return next((route for route in self._routes if route.serves(model)), None)

    async def _listed(self, route: UpstreamRoute, path: str) -> Response | None:
        assert self._desk is not None
        headers = {"Authorization": f"Bearer {route.key}"} if route.key else {}
        try:
            with self._desk.clients.least_busy() as client:
                answer = await client.get(f"{route.url}/models{path}", headers=headers, timeout=_MODELS_S)
        except httpx.HTTPError:
            return None
        try:
            listed = json.loads(Blackout(route.key).whole(answer.content))
        except ValueError:
            status = 502 if answer.is_success else answer.status_code
            return error_response(
                status, "models", f"the endpoint's answer is no list of models (status {answer.status_code})"
            )
        return JSONResponse(listed, status_code=answer.status_code)

    @asynccontextmanager
    async def _life(self) -> AsyncIterator[None]:
        # Every call that finishes without an end that the client accepts is told by uvicorn; the log has it already.
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        patience = httpx.Timeout(None, connect=_CONNECT_S, write=_BODY_S)  # reading is timed by the exchange
        clients = HttpClients(self._settings.max_parallel, bounded=False, timeout=patience)
        self._desk = Desk(self._settings, clients, self._log, self._endpoint.admission, self._endpoint.count)
        try:
            yield
        finally:
            await clients.aclose()


def _is_news(record: logging.LogRecord) -> bool:
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
    by_id: dict[str, Any] = {}
    for answer in answers:
        listed = json.loads(bytes(answer.body))
        data = listed.get("data") if isinstance(listed, dict) else None
        for model in data if isinstance(data, list) else ():
            if isinstance(model, dict):
                by_id.setdefault(str(model.get("id")), model)
    if not answers:
        return error_response(502, "connect", "no endpoint tells its models")
    return JSONResponse({"object": "list", "data": list(by_id.values())})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of its own."""
    parser.add_argument("--upstream", help="endpoint behind it, with /v1 (GATEWAY_UPSTREAM_URL)")
    parser.add_argument("--log", type=Path, default=_LOG, help=f"event log ({_LOG})")


def check(launch: Launch) -> None:
    """Look for the endpoints and their keys.

    Raises:
        ConfigError: No endpoint is set, or its address or key cannot be used.
    """
    settings, environment = GatewaySettings.read(launch.config), launch.environment
    upstream = launch.options.upstream
    if upstream is None and not settings.upstreams and environment.gateway_upstream_url is None:
        raise NotSetUpError("GATEWAY_UPSTREAM_URL is not set, and its YAML lists no `upstreams`")
    open_routes(settings, environment, upstream)


def open_app(launch: Launch) -> ServedApp:
    """The application."""
    settings, token = GatewaySettings.read(launch.config), launch.address().token
    routes = open_routes(settings, launch.environment, launch.options.upstream)
    log = CallLog(launch.options.log)
    app = Gateway(settings, routes, log, token).app()
    return ServedApp(app, token, settings.finish_s, held=log)


def trial(client: httpx.Client) -> str:
    """Ask for the models; that an endpoint has no list of them is no fault of either."""
    try:
        return f"{len(client.get('/v1/models').raise_for_status().json()['data'])} models behind it"
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        if status not in (404, 405, 501):
            raise
        return f"the endpoint answers and lists no models (status {status})"
