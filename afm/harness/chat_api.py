"""OpenAI's chat completions and completions: what a request asks for, and its answer whole or as a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from afm.errors import DataError
from afm.harness.requests import ModelChoice, ModelReply, ModelRequest
from afm.models.base import FinishReason

_MOST_CHOICES = 128
_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.END_OF_TEXT: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
}


class _Body(BaseModel):
    """What is read of any request; other fields are allowed and ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str = ""
    n: int = Field(default=1, ge=1, le=_MOST_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    """0 or -1 for all candidates."""
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, stop: Any) -> Any:
        return () if stop is None else (stop,) if isinstance(stop, str) else stop

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return bool((self.stream_options or {}).get("include_usage"))

    def _sampling(self) -> dict[str, Any]:
        return {
            "n": self.n,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": max(0, self.top_k or 0),
            "stop": self.stop,
            "seed": self.seed,
        }


class ChatBody(_Body):
    """The body of ``chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None

    def request(self) -> ModelRequest:
        """What it asks for.

        Raises:
            DataError: It asks for what no engine here gives.
        """
        kind = (self.response_format or {}).get("type", "text")
        if kind != "text":
            raise DataError(
                f"response_format: got {kind!r}, expected text; the engine does not constrain what it samples. Ask for "
                "JSON in a message, or for a tool call"
            )
        if self.top_logprobs:
            raise DataError(
                f"top_logprobs: got {self.top_logprobs}, expected 0; only the sampled token's is known"
            )
        return ModelRequest(
            messages=[chat_message(message, number) for number, message in enumerate(self.messages)],
            tools=() if self.tool_choice == "none" else tuple(self.tools or ()),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            **self._sampling(),
        )

    def answer(self, reply: ModelReply, pieces: Mapping[int, str]) -> dict[str, Any]:
        """The whole answer; ``pieces`` are the tokens' texts by id."""
        return _about("chat.completion", reply) | {
            "choices": [self._choice(number, choice, pieces) for number, choice in enumerate(reply.choices)],
            "usage": usage(reply),
        }

    def _choice(self, number: int, choice: ModelChoice, pieces: Mapping[int, str]) -> dict[str, Any]:
        return {
            "index": number,
            "message": choice.message,
            "logprobs": self.logprobs_of(choice, pieces),
            "finish_reason": finish_reason(choice),
        } | ({"token_ids": list(choice.generation.token_ids)} if self.return_token_ids else {})

    def logprobs_of(self, choice: ModelChoice, pieces: Mapping[int, str]) -> dict[str, Any] | None:
        """The sampled tokens with their log-probabilities, where they are asked for and known."""
        sampled = choice.generation
        if not self.logprobs or not sampled.logprobs:
            return None
        rows = []
        for token, logprob in zip(sampled.token_ids, sampled.logprobs, strict=True):
            text = pieces[token]
            rows.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": rows, "refusal": None}


def chat_message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A message with its content as text.

    Raises:
        DataError: It has no role, or holds something else than text.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise DataError(f"messages[{number}]: got no role, expected system, user, assistant or tool")
    if isinstance(content, list):
        texts = [
            part.get("text", part.get("refusal")) if isinstance(part, dict) else part for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"messages[{number}]: expected text; the model reads no pictures, sounds or files"
            )
        content = "".join(map(str, texts))
    if content is not None and not isinstance(content, str):
        raise DataError(f"messages[{number}]: content: got {type(content).__name__}, expected text")
    for call in message.get("tool_calls") or ():
        if not isinstance(call, dict) or not isinstance((call.get("function") or {}).get("name"), str):
            raise DataError(
                f"messages[{number}]: a tool call without a function; expected its name and arguments"
            )
    return {**message, "role": "system" if role == "developer" else role, "content": content}


def finish_reason(choice: ModelChoice) -> str:
    """Why a reply ended, in OpenAI's words."""
    return "tool_calls" if choice.calls else _FINISH[choice.generation.finish]


def usage(reply: ModelReply) -> dict[str, int]:
    """Counts of tokens."""
    prompt, completion = len(reply.prompt_ids), reply.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _about(kind: str, reply: ModelReply) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": int(time.time()), "model": reply.model}
