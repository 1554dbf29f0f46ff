"""Completions by a model in this process, on a CPU or one GPU, in the form of vLLM with token ids.

Serves ``/v1/models``, ``/v1/completions`` and ``/v1/chat/completions`` (streaming, tools, ``n``, log-probabilities).
Errors have the form that OpenAI's clients expect.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from afm.errors import AfmError, ConfigError, EngineError
from afm.harness import ModelRequest, RequestRefusedError, Session
from afm.harness.chat_api import AnswerStream, ChatBody
from afm.harness.rendering import renderer_of
from afm.harness.server import stream_answer
from afm.models import FinishReason, Generation, SamplingParams, TokenModel, load_model
from tool_servers.shared.command import Launch, NotSetUpError, ServerSettings
from tool_servers.shared.endpoint import Endpoint, RefusalError, closing
from tool_servers.shared.serve import ServedApp

_MAX_BYTES = 16 << 20
_BODY_S = 30.0
_LIMITS = ServerSettings(max_parallel=4096, finish_s=5.0)
"""The engine batches requests, so this server limits them little."""
_CHAT_TOKENS = 1024
"""Longest reply, unless the request has another limit."""
_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.END_OF_TEXT: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
}


class _Sampled(BaseModel):
    """Fields of every request; other fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str
    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    """0 or -1: all candidates."""
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def params(self) -> SamplingParams:
        """Return the sampling parameters."""
        return SamplingParams(
            self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            stop=self.stop,
            seed=self.seed,
        )


class CompletionRequest(_Sampled):
    """The body of ``POST /v1/completions``; ``prompt`` is text or token ids."""

    prompt: str | list[int]
    prompt_logprobs: int | None = Field(default=None, ge=0, le=0)
    """0 also returns the log-probability of each prompt token, as vLLM does. More candidates are not supported."""
    response_format: dict[str, Any] | None = None

    def prompt_ids(self, model: TokenModel) -> list[int]:
        """Return the token ids that the model continues."""
        return model.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt


class _OpenAIEndpoint(Endpoint):
    no_key = "the key is missing or wrong"

    def error_body(self, refusal: RefusalError) -> dict[str, Any]:
        return {"error": {"message": str(refusal), "type": refusal.kind, "code": refusal.status}}


class _Streamed(Response):
    """A reply that is sent while it is sampled."""

    def __init__(self, session: Session, request: ModelRequest, events: AnswerStream) -> None:
        super().__init__()
        self._work = session, request, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply; stop the generation if the client leaves."""
        await stream_answer(*self._work, receive, send)


class ModelServer:
    """Serves ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions`` and ``/health`` for one model.

    Args:
        key: Key that all requests except ``/health`` must carry.
    """

    def __init__(self, model: TokenModel, key: str | None = None) -> None:
        self._model = model
        self._renderer = renderer_of(model)
        self._endpoint = _OpenAIEndpoint("model", _LIMITS, token=key, max_bytes=_MAX_BYTES, body_s=_BODY_S)
        self._trouble = ""

    def app(self) -> Starlette:
        """Return the application."""
        endpoint = self._endpoint
        return endpoint.app(
            endpoint.get("/v1/models", self._models),
            endpoint.post("/v1/completions", self._parse, self._complete),
            endpoint.post("/v1/chat/completions", self._parse_chat, self._chat),
            life=closing(self._model.close),
            trouble=self._last_trouble,
        )

    async def _last_trouble(self) -> str:
        return self._trouble

    async def _models(self, _: Request) -> Response:
        row = {"id": self._model.name, "object": "model", "max_model_len": self._model.context_tokens}
        return JSONResponse({"object": "list", "data": [row]})

    def _parse(self, _: Request, body: bytes) -> tuple[CompletionRequest, list[int]]:
        request = CompletionRequest.model_validate_json(body)
        self._check_name(request.model)
        if (request.response_format or {}).get("type") not in (None, "text"):
            raise RefusalError(400, "request", "response_format: this engine does not constrain its output")
        try:
            return request, request.prompt_ids(self._model)
        except AfmError as error:
            raise RefusalError(400, "request", str(error)) from None

    def _parse_chat(self, _: Request, body: bytes) -> ChatBody:
        request = ChatBody.model_validate_json(body)
        self._check_name(request.model)
        return request

    def _check_name(self, name: str) -> None:
        if name != self._model.name:
            raise RefusalError(404, "model", f"model {name!r} is not served; {self._model.name!r} is")

    async def _complete(self, prompt: tuple[CompletionRequest, list[int]]) -> dict[str, Any]:
        request, ids = prompt
        with self._failures(len(ids)):
            scored = {} if request.prompt_logprobs is None else await self._scored(ids)
            generation = await self._model.generate(ids, request.params())
        return self._answer(
            self._completion(request.stop, generation) | scored, len(ids), len(generation.token_ids)
        )

    async def _chat(self, body: ChatBody) -> Response | dict[str, Any]:
        """Answer a request; each is a separate conversation."""
        identity, decode = f"chatcmpl-{uuid4().hex}", self._model.decode
        session = Session(identity, self._model, self._renderer)
        with self._failures(0):
            asked = body.request()
            asked = replace(asked, max_tokens=asked.max_tokens or _CHAT_TOKENS)
            if body.stream:
                return _Streamed(session, asked, body.events(identity, self._model.name, decode))
            return body.answer(identity, await session.ask(asked), decode)

    @contextmanager
    def _failures(self, prompt_tokens: int) -> Iterator[None]:
        """Turn errors into refusals; ``/health`` reports a failure of the engine until the engine answers again."""
        try:
            yield
        except EngineError as error:
            full = prompt_tokens >= self._model.context_tokens
            self._trouble = "" if full else str(error)
            raise RefusalError(400 if full else 503, "engine", str(error)) from None
        except RequestRefusedError as error:
            raise RefusalError(error.status, error.code, str(error)) from None
        except AfmError as error:
            raise RefusalError(400, "request", str(error)) from None
        self._trouble = ""

    async def _scored(self, ids: list[int]) -> dict[str, Any]:
        """Return the prompt's log-probabilities in the form of vLLM, with ``None`` for the first token."""
        scores = await self._model.score(ids)
        entries = [
            {str(token): {"logprob": score, "decoded_token": self._model.decode([token])}}
            for token, score in zip(ids[1:], scores, strict=True)
        ]
        return {"prompt_logprobs": [None, *entries]}

    def _completion(self, stops: tuple[str, ...], generation: Generation) -> dict[str, Any]:
        ids = list(generation.token_ids)
        text = self._model.decode(ids)
        stopped = next((stop for stop in stops if stop in text), None)
        return {
            "index": 0,
            "text": text,
            "finish_reason": _FINISH[generation.finish],
            "stop_reason": stopped if generation.finish is FinishReason.STOP else None,
            "token_ids": ids,
            "logprobs": {
                "tokens": [f"token_id:{token}" for token in ids],
                "token_logprobs": list(generation.logprobs),
            },
        }

    def _answer(self, choice: dict[str, Any], prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        return {
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model.name,
            "choices": [choice],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
        }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this server."""
    parser.add_argument("--model", type=Path, help="folder of the model; required")
    parser.add_argument("--name", help="model name for clients; by default that of the folder")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--max-batch", type=int, default=64, help="generations at the same time (64)")


def check(launch: Launch) -> None:
    """Check that there is a model.

    Raises:
        ConfigError: ``--model`` is missing or not the folder of a model.
    """
    folder: Path | None = launch.options.model
    if folder is None:
        raise NotSetUpError("--model is missing; tool_servers/servers.sh start model -- --model FOLDER")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--model: {folder}: not the folder of a model, because it has no config.json")


def open_app(launch: Launch) -> ServedApp:
    """Open the application."""
    check(launch)
    options, token = launch.options, launch.address().token
    model = load_model(options.model, name=options.name, threads=options.threads, max_batch=options.max_batch)
    return ServedApp(ModelServer(model, token).app(), token, _LIMITS.finish_s)


def trial(client: httpx.Client) -> str:
    """Generate one token."""
    [model] = client.get("/v1/models").raise_for_status().json()["data"]
    body = {"model": model["id"], "prompt": "long river", "max_tokens": 1}
    usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    return f"{model['id']} continued a text by {usage['completion_tokens']} token"
