"""OpenAI's Responses API: parse requests, write answers and streams."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field, PrivateAttr, field_validator

from afm.errors import DataError
from afm.harness.chat_api import (
    AnswerStream,
    Decode,
    SamplingBody,
    chat_message,
    check_tool_choice,
    event,
    json_schema,
)
from afm.harness.requests import ModelChoice, ModelReply, ModelRequest
from afm.models.base import FinishReason
from afm.trajectory.chat import chat_of_items


class TextOptions(BaseModel):
    """Form of the text of a response."""

    format: dict[str, Any] | None = None


class ResponsesBody(SamplingBody):
    """Body of ``responses``."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    previous_response_id: str | None = None
    store: bool | None = None
    text: TextOptions | None = None
    conversation: Any = None
    prompt: Any = None
    _earlier: Sequence[Mapping[str, Any]] = PrivateAttr(default=())

    @field_validator("stream", mode="before")
    @classmethod
    def _default(cls, value: Any) -> Any:
        return bool(value)

    @property
    def continues(self) -> str | None:
        """Id of the response that the request continues."""
        return self.previous_response_id

    def after(self, earlier: ModelRequest) -> None:
        """Take the stored messages up to ``previous_response_id``."""
        self._earlier = earlier.messages

    def kept(self, request: ModelRequest, reply: ModelReply) -> ModelRequest | None:
        """Return the messages that a next request continues, or ``None`` with ``store: false``.

        Instructions and tools are not stored: each request sends its own.
        """
        if self.store is False:
            return None
        return ModelRequest(messages=[*self.messages, reply.choices[0].message])

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The chat without the instructions."""
        if isinstance(self.input, str):
            items: Any = [{"role": "user", "content": self.input}]
        else:
            items = chat_of_items(self.input)
        return [*map(dict, self._earlier), *(chat_message(item, at) for at, item in enumerate(items))]

    def request(self) -> ModelRequest:
        """Return the request."""
        for name in ("conversation", "prompt"):
            if getattr(self, name) is not None:
                raise DataError(
                    f"{name}: not supported, because nothing is stored at OpenAI; send the messages as input"
                )
        check_tool_choice(self.tool_choice, [tool.get("name") for tool in self.tools or ()])
        wanted = (self.text and self.text.format) or {}
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return ModelRequest(
            messages=[*first, *self.messages],
            tools=() if self.tool_choice == "none" else tuple(map(_function, self.tools or ())),
            max_tokens=self.max_output_tokens,
            json_schema=json_schema("text.format", wanted, wanted),
            **self.sampling(),
        )

    def answer(self, identity: str, reply: ModelReply, decode: Decode) -> dict[str, Any]:
        """Return the whole answer."""
        choice = reply.choices[0]
        cut = choice.generation.finish is FinishReason.LENGTH
        prompt, completion = len(reply.prompt_ids), reply.completion_tokens
        counts = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        }
        return self.about(identity, reply.model) | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": _items(identity, choice),
            "usage": counts,
        }

    def events(self, identity: str, model: str, decode: Decode) -> AnswerStream:
        """Return a writer of the answer as a stream."""
        return _ResponseStream(self, identity, model, decode)

    def about(self, identity: str, model: str) -> dict[str, Any]:
        """Return a response in progress."""
        return {
            "id": identity,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": self.instructions,
            "metadata": {},
            "model": model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": self.previous_response_id,
            "temperature": self.temperature,
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_p": self.top_p,
        }


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of chat completions.

    Raises:
        DataError: It is a hosted tool, which OpenAI's servers run.
    """
    if tool.get("type") != "function":
        raise DataError(f"tools: got {tool.get('type')!r}, expected function; hosted tools do not run here")
    return {
        "type": "function",
        "function": {key: value for key, value in tool.items() if key in _FUNCTION_KEYS},
    }


_FUNCTION_KEYS = ("name", "description", "parameters")


def _message(identity: str, text: str, status: str = "completed") -> dict[str, Any]:
    return {
        "type": "message",
        "id": f"msg_{identity}",
        "role": "assistant",
        "status": status,
        "content": [_part(text)] if status == "completed" else [],
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _items(identity: str, choice: ModelChoice) -> list[dict[str, Any]]:
    """Return the output items: a message, unless there are only calls, and the calls."""
    said = [_message(identity, choice.text)] if choice.text or not choice.calls else []
    calls = [
        {
            "type": "function_call",
            "id": f"fc_{call.id}",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call in choice.calls
    ]
    return [*said, *calls]


class _ResponseStream:
    def __init__(self, body: ResponsesBody, identity: str, model: str, decode: Decode) -> None:
        self._body, self._identity, self._model, self._decode = body, identity, model, decode
        self._number = 0
        self._said = ""
        self._open = False

    def begin(self) -> bytes:
        about = self._body.about(self._identity, self._model)
        return self._event("response.created", response=about) + self._event(
            "response.in_progress", response=about
        )

    def text(self, number: int, piece: str) -> bytes:
        begun = b"" if self._open else self._begin_message()
        self._said += piece
        return begun + self._event("response.output_text.delta", **self._place(), delta=piece, logprobs=[])

    def end(self, reply: ModelReply) -> bytes:
        answer = self._body.answer(self._identity, reply, self._decode)
        items, written = answer["output"], []
        if items[0]["type"] == "message":
            written.append(b"" if self._open else self._begin_message())
            written.append(self._end_message(items[0]))
        for index, item in enumerate(items):
            if item["type"] == "function_call":
                written += self._call(index, item)
        kind = "response.completed" if answer["status"] == "completed" else "response.incomplete"
        return b"".join([*written, self._event(kind, response=answer)])

    def _begin_message(self) -> bytes:
        self._open = True
        item = _message(self._identity, "", "in_progress")
        return self._event("response.output_item.added", output_index=0, item=item) + self._event(
            "response.content_part.added", **self._place(), part=_part("")
        )

    def _end_message(self, item: dict[str, Any]) -> bytes:
        part = item["content"][0]
        return (
            self._event("response.output_text.done", **self._place(), text=part["text"], logprobs=[])
            + self._event("response.content_part.done", **self._place(), part=part)
            + self._event("response.output_item.done", output_index=0, item=item)
        )

    def _call(self, index: int, item: dict[str, Any]) -> list[bytes]:
        place = {"item_id": item["id"], "output_index": index}
        arguments = item["arguments"]
        begun = {**item, "arguments": "", "status": "in_progress"}
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=arguments),
            self._event(
                "response.function_call_arguments.done", **place, name=item["name"], arguments=arguments
            ),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._identity}", "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **data: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **data}, kind)
