"""Requests of a program to the model and their replies, independent of the protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afm.errors import AfmError, DataError, json_word
from afm.models.base import Generation


class RequestRefusedError(AfmError):
    """A request that the gateway refuses. The program gets the reason.

    Attributes:
        status: HTTP status. Clients do not retry any of these.
        code: Machine-readable reason.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code = status, code
        super().__init__(message)


_MOST_LEVELS = 64


def json_text(value: Any, *, allow_nan: bool = True) -> str:
    """Return a value as JSON text with every character as it is.

    Raises:
        ValueError: It is nested more than 64 levels deep, or has a number or a character that cannot be written.
    """
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [item for each in inner for item in (each.values() if isinstance(each, dict) else each)]
    if inner:
        raise ValueError(f"got more than {_MOST_LEVELS} levels of lists and objects")
    text = json.dumps(value, ensure_ascii=False, allow_nan=allow_nan)
    text.encode()
    return text


def decoded_arguments(arguments: Any) -> Any:
    """Return the arguments of a call as a JSON value. Text that is not JSON stays text."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def function_of(holder: Any, place: str) -> Mapping[str, Any]:
    """Return the function of a tool, or of a call, in the form of chat completions.

    Raises:
        DataError: It has no function with a name.
    """
    function = holder.get("function") if isinstance(holder, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{place}: got {str(holder)[:80]}, expected an object whose function has a name")
    return function


def canonical_message(message: Mapping[str, Any]) -> str:
    """Return a message without the details that clients change: ids, empty fields, JSON spelling, surrounding blanks."""
    role, content = message.get("role"), message.get("content") or ""
    if role == "assistant":
        content = content.strip()
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    called = [[call["name"], decoded_arguments(call.get("arguments"))] for call in calls]
    return json.dumps([role, content, called], sort_keys=True)


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One request of a program: a chat (``messages``), or a text to continue (``prompt``).

    Attributes:
        messages: Messages in the form of OpenAI's chat completions.
        tools: Tools in the same form.
        prompt: Text or token ids.
        n: Number of replies.
        max_tokens: Most tokens of a reply. ``None`` allows as many as fit.
        continued: Whether the last message is an unfinished reply of the assistant.
        json_schema: JSON schema, as text, that the reply must match. ``None`` for free text.
        member: Name of the team member that asks. A conversation belongs to one member.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    prompt: str | Sequence[int] | None = None
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    json_schema: str | None = None
    member: str = ""
    continued: bool = False

    @property
    def characters(self) -> int:
        """Number of characters of the prompt: all of the messages and tools, as JSON. Token ids count as 0.

        Raises:
            DataError: A text cannot be encoded.
        """
        if self.prompt is not None and not isinstance(self.prompt, str):
            return 0
        try:
            text = self.prompt or json.dumps([*self.messages, *self.tools], ensure_ascii=False, default=str)
            text.encode()
        except (ValueError, RecursionError) as error:
            raise DataError(f"the request cannot be written in UTF-8: {error}") from None
        return len(text)

    def check(self) -> None:
        """Refuse a chat that cannot be rendered.

        Raises:
            DataError: There is no message, or a tool or a call has a wrong form.
        """
        if self.prompt is None and not self.messages:
            raise DataError("messages: got none with content, expected at least one")
        for number, tool in enumerate(self.tools):
            function_of(tool, f"tools[{number}]")
        for number, message in enumerate(self.messages):
            _check_calls(message.get("tool_calls") or [], f"messages[{number}].tool_calls")


def _check_calls(calls: Any, place: str) -> None:
    """Refuse calls of a message that no template can render, with a DataError."""
    if not isinstance(calls, list | tuple):
        raise DataError(f"{place}: got {json_word(calls)}, expected a list")
    for number, call in enumerate(calls):
        function = function_of(call, f"{place}[{number}]")
        try:
            json_text(decoded_arguments(function.get("arguments")))
        except (TypeError, ValueError, RecursionError) as error:
            expected = f"JSON in UTF-8 with at most {_MOST_LEVELS} levels of lists and objects"
            raise DataError(f"{place}[{number}]: arguments: {error}; expected {expected}") from None


@dataclass(frozen=True, slots=True)
class ReplyCall:
    """A tool call in a reply. ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """One reply.

    Attributes:
        text: Text for the program: up to the stop string, without the tool calls.
        raw_text: All sampled text, with stop string and tool calls.
    """

    text: str
    raw_text: str
    calls: tuple[ReplyCall, ...]
    generation: Generation

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message in the form of OpenAI's chat completions."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            message["content"] = self.text or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class ModelReply:
    """The reply to a request. ``call`` is the number of the request in its session."""

    call: int
    model: str
    prompt_ids: tuple[int, ...]
    choices: tuple[ModelChoice, ...]

    @property
    def completion_tokens(self) -> int:
        """Number of sampled tokens of all choices."""
        return sum(len(choice.generation.token_ids) for choice in self.choices)
