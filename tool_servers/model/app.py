"""Completions of a model, as vLLM answers them when it is asked for token ids."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from afm.errors import AfmError, EngineError
from afm.models import FinishReason, Generation, SamplingParams, TokenModel
from tool_servers.shared.access import allowed
from tool_servers.shared.requests import GoneError, TooLargeError, bounded_body, refused, while_connected

_MAX_BYTES = 16 << 20
_BODY_S = 30.0
_GONE = 499


class _Sampled(BaseModel):
    """What is read of any request; all other fields are allowed and ignored.

    Attributes:
        top_k: 0 or -1 for all candidates.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str
    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def params(self) -> SamplingParams:
        """How to sample."""
        return SamplingParams(
            self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            stop=self.stop,
            seed=self.seed,
        )


class CompletionRequest(_Sampled):
    """``prompt`` is text, or token ids."""

    prompt: str | list[int]

    def prompt_ids(self, model: TokenModel) -> list[int]:
        """What the model continues."""
        return model.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    role: str
    content: str


class ChatRequest(_Sampled):
    """A chat, rendered by the model's own template."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int = Field(default=1024, ge=1)

    def prompt_ids(self, model: TokenModel) -> list[int]:
        """What the model continues."""
        return list(model.encode_prompt([message.model_dump() for message in self.messages]))


RequestT = TypeVar("RequestT", CompletionRequest, ChatRequest)


class ModelServer:
    """``/v1/models``, ``/v1/completions``, ``/v1/chat/completions`` and ``/health`` of one model.

    Args:
        key: Asked of every request but ``/health``.
    """

    def __init__(self, model: TokenModel, key: str | None = None) -> None:
        self._model = model
        self._key = key
        self._trouble = ""

    def app(self) -> FastAPI:
        """The application."""
        app = FastAPI(lifespan=self._life, docs_url=None, redoc_url=None, openapi_url=None)
        app.add_exception_handler(HTTPException, refused)
        app.get("/v1/models")(self.models)
        app.post("/v1/completions")(self.completions)
        app.post("/v1/chat/completions")(self.chat)
        app.get("/health")(self.health)
        return app

    async def health(self) -> Response:
        """Whether the last generation was well."""
        if self._trouble:
            return JSONResponse({"status": "failing"}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        """The one model."""
        if not allowed(request.headers, self._key):
            return _refusal(401, "the key is missing or wrong")
        row = {"id": self._model.name, "object": "model", "max_model_len": self._model.context_tokens}
        return JSONResponse({"object": "list", "data": [row]})

    async def completions(self, request: Request) -> Response:
        """One generation, with its token ids."""
        return await self._generated(request, CompletionRequest, self._completion)

    async def chat(self, request: Request) -> Response:
        """One reply, without the stop string that ended it."""
        return await self._generated(request, ChatRequest, self._reply)

    async def _generated(
        self,
        request: Request,
        kind: type[RequestT],
        choice: Callable[[RequestT, Generation], dict[str, Any]],
    ) -> Response:
        if not allowed(request.headers, self._key):
            return _refusal(401, "the key is missing or wrong")
        ids: list[int] = []
        try:
            asked = kind.model_validate_json(await bounded_body(request, _MAX_BYTES, _BODY_S))
            if asked.model != self._model.name:
                return _refusal(404, f"model {asked.model!r} is not served; {self._model.name!r} is")
            ids = asked.prompt_ids(self._model)
            generation = await while_connected(request, self._model.generate(ids, asked.params()))
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
            return _refusal(400, f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}")
        except TooLargeError as error:
            return _refusal(413, str(error))
        except TimeoutError:
            return _refusal(408, f"the request did not arrive within {_BODY_S:g} s")
        except GoneError:
            return _refusal(_GONE, "the client has left")
        except EngineError as error:
            full = len(ids) >= self._model.context_tokens
            self._trouble = "" if full else str(error)
            return _refusal(400 if full else 503, str(error))
        except AfmError as error:
            return _refusal(400, str(error))
        self._trouble = ""
        return JSONResponse(self._answer(choice(asked, generation), len(ids), len(generation.token_ids)))

    def _completion(self, asked: CompletionRequest, generation: Generation) -> dict[str, Any]:
        ids = list(generation.token_ids)
        text = self._model.decode(ids)
        stopped = next((stop for stop in asked.stop if stop in text), None)
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

    def _reply(self, asked: ChatRequest, generation: Generation) -> dict[str, Any]:
        text = self._model.decode(list(generation.token_ids))
        end = min((text.find(stop) for stop in asked.stop if stop in text), default=len(text))
        message = {"role": "assistant", "content": text[:end]}
        return {"index": 0, "message": message, "finish_reason": _FINISH[generation.finish]}

    def _answer(self, choice: dict[str, Any], prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        return {
            "object": "chat.completion" if "message" in choice else "text_completion",
            "created": int(time.time()),
            "model": self._model.name,
            "choices": [choice],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
        }

    @asynccontextmanager
    async def _life(self, _: FastAPI) -> AsyncIterator[None]:
        yield
        await self._model.close()


_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.END_OF_TEXT: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
}


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
