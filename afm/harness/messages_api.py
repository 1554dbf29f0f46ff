"""Anthropic's Messages API: parse requests, write answers and streams."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, PrivateAttr, field_validator, model_validator

from afm.errors import DataError
from afm.harness.chat_api import AnswerStream, Decode, SamplingBody, chat_message, event
from afm.harness.requests import ModelChoice, ModelReply, ModelRequest
from afm.models.base import FinishReason

_THOUGHTS = ("thinking", "redacted_thinking")


class Thread(BaseModel):
    """A conversation that the server stores. Clients send only new messages."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.type == "continue" and self.previous_message_id is None:
            raise ValueError("got continue without previous_message_id, expected the id of the last reply")
        return self


class MessagesBody(SamplingBody):
    """Body of ``messages``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: tuple[str, ...] = ()
    thread: Thread | None = None
    mcp_servers: list[Any] | None = None
    compaction: dict[str, Any] | None = None
    _thread: ModelRequest | None = PrivateAttr(default=None)

    @field_validator("stop_sequences", mode="before")
    @classmethod
    def _listed(cls, stop: Any) -> Any:
        return stop or ()

    @property
    def continues(self) -> str | None:
        """Id of the reply in the same thread that the request continues."""
        return self.thread.previous_message_id if self.thread is not None else None

    def after(self, thread: ModelRequest) -> None:
        """Take the stored thread, with its system prompt and tools."""
        self._thread = thread

    def kept(self, request: ModelRequest, reply: ModelReply) -> ModelRequest | None:
        """Return the thread for its next request, or ``None`` without a thread."""
        if self.thread is None:
            return None
        return replace(
            request, messages=[*request.messages, reply.choices[0].message], tools=self._declared()
        )

    def _declared(self) -> tuple[Mapping[str, Any], ...]:
        if self._thread is not None:
            return tuple(self._thread.tools)
        return tuple(map(_function, self.tools or ()))

    def request(self) -> ModelRequest:
        """Return the request."""
        for name in ("mcp_servers", "compaction"):
            if getattr(self, name):
                raise DataError(f"{name}: not supported; the program has to do this itself")
        rows: list[Mapping[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for message in self.messages:
            rows += _chat(message)
        before = self._thread.messages if self._thread is not None else ()
        offered = (self.tool_choice or {}).get("type") != "none"
        return ModelRequest(
            messages=[*before, *(chat_message(row, number) for number, row in enumerate(rows))],
            tools=self._declared() if offered else (),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            **self.sampling(),
        )

    def answer(self, identity: str, reply: ModelReply, decode: Decode) -> dict[str, Any]:
        """Return the whole answer."""
        [choice] = reply.choices
        said = [{"type": "text", "text": choice.text}] if choice.text or not choice.calls else []
        calls = [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
            for call in choice.calls
        ]
        return self.about(identity, reply.model) | {
            "content": [*said, *calls],
            **self.stopped(choice),
            "usage": {"input_tokens": len(reply.prompt_ids), "output_tokens": reply.completion_tokens},
        }

    def events(self, identity: str, model: str, decode: Decode) -> AnswerStream:
        """Return a writer of the answer as a stream."""
        return _MessageStream(self, identity, model, decode)

    def about(self, identity: str, model: str) -> dict[str, Any]:
        """Return a message without content."""
        return {
            "id": identity,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }

    def stopped(self, choice: ModelChoice) -> dict[str, Any]:
        """Return the fields that name why a choice ended."""
        if choice.calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        match choice.generation.finish:
            case FinishReason.LENGTH:
                return {"stop_reason": "max_tokens", "stop_sequence": None}
            case FinishReason.STOP:
                found = next((stop for stop in self.stop_sequences if stop in choice.raw_text), None)
                return {"stop_reason": "stop_sequence", "stop_sequence": found}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of chat completions.

    Raises:
        DataError: It is a hosted tool, which Anthropic's servers run.
    """
    if "input_schema" not in tool:
        raise DataError(f"tools: {tool.get('name')!r} has no input_schema; hosted tools do not run here")
    words = {"name": tool.get("name"), "description": tool.get("description") or ""}
    return {"type": "function", "function": {**words, "parameters": tool["input_schema"]}}


def _chat(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a message in the form of chat completions. Each tool result is a separate message before the text."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    texts, calls = [], []
    for block in content:
        match block.get("type") if isinstance(block, dict) else None:
            case "tool_use":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                function = {"name": block.get("name"), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                yield {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": block.get("content") or "",
                }
            case kind if kind not in _THOUGHTS:
                texts.append(block)
    if texts or calls or role == "assistant":
        yield {"role": role, "content": texts} | ({"tool_calls": calls} if calls else {})


class _MessageStream:
    def __init__(self, body: MessagesBody, identity: str, model: str, decode: Decode) -> None:
        self._body, self._identity, self._model, self._decode = body, identity, model, decode
        self._open = False

    def begin(self) -> bytes:
        return _event("message_start", message=self._body.about(self._identity, self._model))

    def text(self, number: int, piece: str) -> bytes:
        begun = b""
        if not self._open:
            self._open = True
            begun = _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        return begun + _event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})

    def end(self, reply: ModelReply) -> bytes:
        answer = self._body.answer(self._identity, reply, self._decode)
        written = [_event("content_block_stop", index=0)] if self._open else []
        for index, block in enumerate(answer["content"]):
            if block["type"] == "tool_use":
                arguments = json.dumps(block["input"], ensure_ascii=False)
                delta = {"type": "input_json_delta", "partial_json": arguments}
                written += [
                    _event("content_block_start", index=index, content_block={**block, "input": {}}),
                    _event("content_block_delta", index=index, delta=delta),
                    _event("content_block_stop", index=index),
                ]
        last = {key: answer[key] for key in ("stop_reason", "stop_sequence")}
        return b"".join(
            [*written, _event("message_delta", delta=last, usage=answer["usage"]), _event("message_stop")]
        )


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)
