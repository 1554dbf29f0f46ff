"""The gateway: a proxy in front of OpenAI-compatible endpoints that records every call.

| request | answer |
|---|---|
| ``POST /v1/chat/completions``, ``POST /v1/completions`` | that of the endpoint, streamed or not; the call is logged |
| ``GET /v1/models``, ``GET /v1/models/ID`` | that of the endpoint |
| ``GET /health`` | 200, or 503 when the log cannot be written; needs no token |
| ``GET /metrics`` | metrics for Prometheus |

The first two rows also exist below ``/task/ID`` and ``/task/ID/agent/NAME`` (see :func:`label_of`). Answers of the
endpoint, including errors, are passed on unchanged. The gateway sends a call only if the log has space for it;
otherwise it answers 503. Its own errors have the body ``{"error": {"message", "type": "gateway_error", "code"}}``.
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
from afm.errors import DataError, first_fault
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
from tool_servers.shared.endpoint import Endpoint, RefusalError
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
    """Split an ``Authorization`` header into the key and the names after it.

    Raises:
        DataError: The names do not have the form ``task=ID,agent=NAME``.
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
                f"API key: got {part[:40]!r} after the key, expected task=ID,agent=NAME,attempt=NUMBER; percent-encode "
                "special characters in values, for example a comma as %2C"
            )
        names[name] = unquote(value)
    return parts["key"], names


def label_of(
    headers: Mapping[str, str], in_path: Mapping[str, str], in_key: Mapping[str, str], body: Mapping[str, Any]
) -> Label:
    """Return the label of a request; without a task, derive one from the first words.

    | form | where |
    |---|---|
    | base URL | ``http://HOST:PORT/task/ID/agent/NAME/v1`` (``/agent/NAME`` may be absent) |
    | headers | ``X-AFM-Task``, ``X-AFM-Agent``, ``X-AFM-Attempt`` |
    | API key | ``KEY:task=ID,agent=NAME,attempt=2`` |

    Values in all three forms are percent-decoded. For each name, the first form in the table wins.

    Raises:
        DataError: A name is too long or contains control characters, or the attempt is not a number.
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
        raise DataError(first_fault(error, "body")) from None
    if _HIDDEN.search(label.task + label.agent):
        raise DataError("task or agent: contains control characters, expected a name")
    return label


def _task_by_words(body: Mapping[str, Any]) -> str:
    """Return a task id from the first user message, which is the same in all calls of a conversation."""
    messages = body.get("messages")
    first = ""
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        said = (item for item in messages if isinstance(item, Mapping) and item.get("role") == "user")
        first = message_text(next(said, {}))
    words = first or str(body.get("prompt", ""))
    return "auto-" + hashlib.sha256(words.encode("utf-8", "surrogatepass")).hexdigest()[:12]


class _GatewayEndpoint(Endpoint):
    no_key = "the API key is missing or wrong; expected GATEWAY_TOKEN, or GATEWAY_TOKEN:task=ID,agent=NAME"
    advice = f"; the gateway records {' and '.join(_PATHS)}"

    def allows(self, headers: Mapping[str, str]) -> bool:
        key, _ = key_and_names(headers.get("authorization", ""))
        return super().allows({"authorization": f"Bearer {key}"})

    def error_body(self, refusal: RefusalError) -> dict[str, Any]:
        return error_body(refusal)


class Gateway:
    """Passes calls on and records them.

    Args:
        routes: Endpoints; the first that serves a model gets the call.
        log: Log of the calls, which must be open.
        token: First part of the key that clients must send; ``None`` accepts any key.
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
        """Return the application."""
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
        """Return the models of all endpoints, or one endpoint's answer about one model."""
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
        """Parse a request. A body that is not a JSON object passes unchanged; the endpoint rejects it."""
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
                status,
                "models",
                f"the endpoint's answer is not a list of models (status {answer.status_code})",
            )
        return JSONResponse(listed, status_code=answer.status_code)

    @asynccontextmanager
    async def _life(self) -> AsyncIterator[None]:
        # uvicorn logs every response that it could not complete. The call log already has these calls.
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        patience = httpx.Timeout(None, connect=_CONNECT_S, write=_BODY_S)  # the exchange times the reading
        clients = HttpClients(self._settings.max_parallel, bounded=False, timeout=patience)
        self._desk = Desk(self._settings, clients, self._log, self._endpoint.admission, self._endpoint.count)
        try:
            yield
        finally:
            await clients.aclose()


def _is_news(record: logging.LogRecord) -> bool:
    return "without completing response" not in record.getMessage()


def _path_of(model: str) -> str | None:
    """Return the path of a model at an endpoint, or ``None`` if the name leads to another path, which must not get the key."""
    if any(part in ("", ".", "..") for part in model.split("/")):
        return None
    return "/" + quote(model, safe="/:@")


def _joined(answers: list[Response]) -> Response:
    """Join lists of models; return a single answer unchanged."""
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
        return error_response(502, "connect", "no endpoint lists its models")
    return JSONResponse({"object": "list", "data": list(by_id.values())})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this server."""
    parser.add_argument("--upstream", help="endpoint behind the gateway, with /v1 (GATEWAY_UPSTREAM_URL)")
    parser.add_argument("--log", type=Path, default=_LOG, help=f"event log ({_LOG})")


def check(launch: Launch) -> None:
    """Check the endpoints and their keys.

    Raises:
        ConfigError: No endpoint is set, or its address or key is invalid.
    """
    settings, environment = GatewaySettings.read(launch.config), launch.environment
    upstream = launch.options.upstream
    if upstream is None and not settings.upstreams and environment.gateway_upstream_url is None:
        raise NotSetUpError("GATEWAY_UPSTREAM_URL is not set, and its YAML has no `upstreams`")
    open_routes(settings, environment, upstream)


def open_app(launch: Launch) -> ServedApp:
    """Open the application."""
    settings, token = GatewaySettings.read(launch.config), launch.address().token
    routes = open_routes(settings, launch.environment, launch.options.upstream)
    log = CallLog(launch.options.log)
    app = Gateway(settings, routes, log, token).app()
    return ServedApp(app, token, settings.finish_s, held=log)


def trial(client: httpx.Client) -> str:
    """List the models. An endpoint without such a list passes too."""
    try:
        return f"models behind it: {len(client.get('/v1/models').raise_for_status().json()['data'])}"
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        if status not in (404, 405, 501):
            raise
        return f"the endpoint answers but lists no models (status {status})"
