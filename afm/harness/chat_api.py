"""OpenAI's chat completions and completions: parse requests, write answers and streams."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator

from afm.errors import DataError, json_word
from afm.harness.requests import ModelChoice, ModelReply, ModelRequest, function_of
from afm.models.base import FinishReason

_MOST_CHOICES = 128
_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.END_OF_TEXT: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
}
DONE = b"data: [DONE]\n\n"
Decode = Callable[[Sequence[int]], str]


class AnswerStream(Protocol):
    """Writer of an answer as server-sent events during sampling."""

    def begin(self) -> bytes:
        """Return the events before the first text."""
        ...

    def text(self, number: int, piece: str) -> bytes:
        """Return the events for the next piece of a choice's text."""
        ...

    def end(self, reply: ModelReply) -> bytes:
        """Return the events after the texts: tool calls, finish reasons, token counts."""
        ...


class ApiBody(Protocol):
    """Body of a request in one protocol."""

    stream: bool

    def request(self) -> ModelRequest:
        """Return the request. Raises DataError for an unsupported option."""
        ...

    def answer(self, identity: str, reply: ModelReply, decode: Decode) -> dict[str, Any]:
        """Return the whole answer."""
        ...

    def events(self, identity: str, model: str, decode: Decode) -> AnswerStream:
        """Return a writer of the answer as a stream."""
        ...


def event(data: Any, name: str = "") -> bytes:
    """Return one server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


class SamplingBody(BaseModel):
    """Fields that all protocols share. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    model: str = ""
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    """Number of candidates. 0 and -1 mean all."""
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    stream: bool = False

    @property
    def continues(self) -> str | None:
        """Id of the stored reply that the request continues, in protocols with stored replies."""
        return None

    def after(self, earlier: ModelRequest) -> None:
        """Take the stored conversation of the reply that :attr:`continues` names."""

    def kept(self, request: ModelRequest, reply: ModelReply) -> ModelRequest | None:
        """Return the conversation to store so that the reply can be continued, or ``None``."""
        return None

    def sampling(self) -> dict[str, Any]:
        """Return the sampling fields of a :class:`ModelRequest`. A ``top_p`` of 0 becomes a ``top_k`` of 1."""
        return {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p or 1.0,
            "top_k": 1 if self.top_p == 0 else max(0, self.top_k or 0),
            "seed": self.seed,
        }


class _OpenAIBody(SamplingBody):
    n: int = Field(default=1, ge=1, le=_MOST_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: tuple[str, ...] = ()
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False
    """vLLM's option: the answer has the token ids of the prompt and of each choice."""

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, stop: Any) -> Any:
        return () if stop is None else (stop,) if isinstance(stop, str) else stop

    @field_validator("stream", "n", mode="before")
    @classmethod
    def _default(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if value is None else value

    def sampling(self) -> dict[str, Any]:
        """Return the sampling fields with the number of choices and the stop strings."""
        return super().sampling() | {"n": self.n, "stop": self.stop}

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return bool((self.stream_options or {}).get("include_usage"))

    def stop_reason(self, choice: ModelChoice) -> str | None:
        """Return the stop string that ended a choice (vLLM's field ``stop_reason``)."""
        if choice.generation.finish is not FinishReason.STOP:
            return None
        return next((stop for stop in self.stop if stop in choice.raw_text), None)

    def ids_of(self, choice: ModelChoice) -> dict[str, Any]:
        """Return the field with a choice's token ids if they are requested."""
        return {"token_ids": list(choice.generation.token_ids)} if self.return_token_ids else {}


class ChatBody(_OpenAIBody):
    """Body of ``chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    continue_final_message: bool = False
    """vLLM's option: the last message is an unfinished reply."""

    def request(self) -> ModelRequest:
        """Return the request, as :meth:`ApiBody.request` describes."""
        wanted, tools = self.response_format or {}, self.tools or ()
        names = [function_of(tool, f"tools[{number}]")["name"] for number, tool in enumerate(tools)]
        check_tool_choice(self.tool_choice, names)
        if self.top_logprobs:
            raise DataError(
                f"top_logprobs: got {self.top_logprobs}, expected 0; only the sampled token has a log-probability"
            )
        return ModelRequest(
            messages=[chat_message(message, number) for number, message in enumerate(self.messages)],
            tools=() if self.tool_choice == "none" else tuple(tools),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            json_schema=json_schema("response_format", wanted, wanted.get("json_schema")),
            continued=self.continue_final_message,
            **self.sampling(),
        )

    def answer(self, identity: str, reply: ModelReply, decode: Decode) -> dict[str, Any]:
        """Return the answer, as :meth:`ApiBody.answer` describes."""
        choices = [
            {
                "index": number,
                "message": choice.message,
                "logprobs": self.logprobs_of(choice, decode),
                "finish_reason": finish_reason(choice),
                "stop_reason": self.stop_reason(choice),
            }
            | self.ids_of(choice)
            for number, choice in enumerate(reply.choices)
        ]
        whole = _about("chat.completion", identity, reply.model) | {"choices": choices, "usage": usage(reply)}
        return whole | ({"prompt_token_ids": list(reply.prompt_ids)} if self.return_token_ids else {})

    def events(self, identity: str, model: str, decode: Decode) -> AnswerStream:
        """Return the stream's writer, as :meth:`ApiBody.events` describes."""
        return _ChatStream(self, _about("chat.completion.chunk", identity, model), decode)

    def logprobs_of(self, choice: ModelChoice, decode: Decode) -> dict[str, Any] | None:
        """Return the sampled tokens with their log-probabilities if they are requested and known."""
        sampled = choice.generation
        if not self.logprobs or not sampled.logprobs:
            return None
        rows = []
        for token, logprob in zip(sampled.token_ids, sampled.logprobs, strict=True):
            text = decode([token])
            rows.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": rows, "refusal": None}


class _ChatStream:
    def __init__(self, body: ChatBody, about: dict[str, Any], decode: Decode) -> None:
        self._body, self._about, self._decode = body, about, decode

    def begin(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(number, role) for number in range(self._body.n))

    def text(self, number: int, piece: str) -> bytes:
        return self._chunk(number, {"content": piece})

    def end(self, reply: ModelReply) -> bytes:
        return b"".join([*self._ends(reply), *_usage_event(self._body, self._about, reply), DONE])

    def _ends(self, reply: ModelReply) -> Iterator[bytes]:
        for number, choice in enumerate(reply.choices):
            for place, call in enumerate(choice.message.get("tool_calls", ())):
                yield self._chunk(number, {"tool_calls": [{"index": place, **call}]})
            last = {
                "finish_reason": finish_reason(choice),
                "stop_reason": self._body.stop_reason(choice),
                "logprobs": self._body.logprobs_of(choice, self._decode),
            }
            yield self._chunk(number, {}, **last, **self._body.ids_of(choice))

    def _chunk(self, number: int, delta: Mapping[str, Any], **more: Any) -> bytes:
        choice = {"index": number, "delta": delta, "finish_reason": None, **more}
        return event({**self._about, "choices": [choice]})


class CompletionBody(_OpenAIBody):
    """Body of ``completions``. ``prompt`` is text or token ids."""

    prompt: str | list[int]
    logprobs: int | None = None
    echo: bool | None = None
    include_stop_str_in_output: bool = False
    return_tokens_as_token_ids: bool = False

    @field_validator("prompt", mode="before")
    @classmethod
    def _single(cls, prompt: Any) -> Any:
        """Unpack a list with one prompt."""
        inner = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else None
        return inner if isinstance(inner, str | list) else prompt

    def request(self) -> ModelRequest:
        """Return the request, as :meth:`ApiBody.request` describes."""
        if self.echo:
            raise DataError("echo: got true, expected false; the answer cannot repeat the prompt")
        return ModelRequest(prompt=self.prompt, max_tokens=self.max_tokens or 16, **self.sampling())

    def answer(self, identity: str, reply: ModelReply, decode: Decode) -> dict[str, Any]:
        """Return the answer, as :meth:`ApiBody.answer` describes."""
        choices = [
            {"index": number, "text": self._text(choice), **self.facts(choice, decode)}
            for number, choice in enumerate(reply.choices)
        ]
        return _about("text_completion", identity, reply.model) | {"choices": choices, "usage": usage(reply)}

    def events(self, identity: str, model: str, decode: Decode) -> AnswerStream:
        """Return the stream's writer, as :meth:`ApiBody.events` describes."""
        return _CompletionStream(self, _about("text_completion", identity, model), decode)

    def rest(self, choice: ModelChoice) -> str:
        """Return the text that a stream adds at its end: the stop string if it is requested."""
        return self._text(choice)[len(choice.text) :]

    def _text(self, choice: ModelChoice) -> str:
        return choice.raw_text if self.include_stop_str_in_output else choice.text

    def facts(self, choice: ModelChoice, decode: Decode) -> dict[str, Any]:
        """Return finish reason, token ids and log-probabilities in vLLM's form."""
        sampled = choice.generation
        facts: dict[str, Any] = {
            "finish_reason": finish_reason(choice),
            "stop_reason": self.stop_reason(choice),
            "logprobs": None,
        }
        if self.logprobs is not None:
            as_ids = self.return_tokens_as_token_ids
            tokens = [f"token_id:{token}" if as_ids else decode([token]) for token in sampled.token_ids]
            facts["logprobs"] = {"tokens": tokens, "token_logprobs": list(sampled.logprobs)}
        return facts | self.ids_of(choice)


class _CompletionStream:
    def __init__(self, body: CompletionBody, about: dict[str, Any], decode: Decode) -> None:
        self._body, self._about, self._decode = body, about, decode

    def begin(self) -> bytes:
        return b""

    def text(self, number: int, piece: str) -> bytes:
        return self._chunk(number, piece, finish_reason=None)

    def end(self, reply: ModelReply) -> bytes:
        ends = [
            self._chunk(number, self._body.rest(choice), **self._body.facts(choice, self._decode))
            for number, choice in enumerate(reply.choices)
        ]
        return b"".join([*ends, *_usage_event(self._body, self._about, reply), DONE])

    def _chunk(self, number: int, piece: str, **more: Any) -> bytes:
        return event({**self._about, "choices": [{"index": number, "text": piece, **more}]})


def _usage_event(body: _OpenAIBody, about: Mapping[str, Any], reply: ModelReply) -> list[bytes]:
    return [event({**about, "choices": [], "usage": usage(reply)})] if body.include_usage else []


def json_schema(name: str, wanted: Mapping[str, Any], holder: Any) -> str | None:
    """Return the JSON schema of a request's format as text, or ``None`` for free text.

    Args:
        holder: Mapping with ``schema`` if the type is ``json_schema``.

    Raises:
        DataError: The format is unknown or has no schema.
    """
    match wanted.get("type"):
        case None | "text":
            return None
        case "json_object":
            return '{"type": "object"}'
        case "json_schema" if isinstance(holder, dict) and isinstance(holder.get("schema"), dict):
            return json.dumps(holder["schema"], ensure_ascii=False)
        case kind:
            raise DataError(f"{name}: got {kind!r}, expected text, json_object, or json_schema with a schema")


def check_tool_choice(choice: Any, names: Sequence[Any]) -> None:
    """Refuse an invalid tool choice. All valid ones but ``none`` mean ``auto``: the model decides whether to call a tool.

    Raises:
        DataError: The choice is malformed, or names a tool that is not offered.
    """
    match choice:
        case None | "none" | "auto":
            return
        case "required" if names:
            return
        case {"type": "allowed_tools"}:
            return
        case {"type": "function", "function": {"name": name}} | {"type": "function", "name": name}:
            if name in names:
                return
    offered = ", ".join(map(str, names)) or "no tool"
    raise DataError(
        f"tool_choice: got {json.dumps(choice)}, expected none, auto, or required or a function of the "
        f"request's tools ({offered})"
    )


def chat_message(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a message with its content as text.

    Raises:
        DataError: It has no role, or content other than text.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise DataError(f"messages[{number}]: role is missing, expected system, user, assistant or tool")
    if isinstance(content, list):
        texts = [
            part.get("text", part.get("refusal")) if isinstance(part, dict) else part for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"messages[{number}]: expected text; pictures, sounds and files are not supported"
            )
        content = "".join(map(str, texts))
    if content is not None and not isinstance(content, str):
        raise DataError(f"messages[{number}]: content: got {json_word(content)}, expected text")
    return {**message, "role": "system" if role == "developer" else role, "content": content}


def finish_reason(choice: ModelChoice) -> str:
    """Return OpenAI's finish reason of a reply."""
    return "tool_calls" if choice.calls else _FINISH[choice.generation.finish]


def usage(reply: ModelReply) -> dict[str, int]:
    """Return the token counts of a reply."""
    prompt, completion = len(reply.prompt_ids), reply.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _about(kind: str, identity: str, model: str) -> dict[str, Any]:
    return {"id": identity, "object": kind, "created": int(time.time()), "model": model}
