"""The answer of an endpoint, whole or streamed, in one form for the log."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_GROWING = frozenset({"content", "reasoning_content", "reasoning", "refusal", "text"})
"""Keys of a delta whose texts are concatenated; other keys occur once."""
DONE = b"[DONE]"
_MOST_TOKENS = 10_000_000
"""Largest token count of a call; a larger one is an error of the endpoint."""


@dataclass
class Answer:
    """One answer, as far as it has arrived.

    Attributes:
        choices: Choices by index.
        usage: Token counts as the endpoint reported them.
        done: Whether the stream sent its end mark.
    """

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    done: bool = False

    @property
    def finished(self) -> bool:
        """Whether the answer is complete: the end mark arrived, or every choice has a finish reason."""
        ends = [choice.get("finish_reason") for choice in self.choices.values()]
        return self.done or (bool(ends) and all(ends))

    @property
    def in_order(self) -> tuple[dict[str, Any], ...]:
        """The choices, sorted by index."""
        return tuple(self.choices[index] for index in sorted(self.choices))

    def tokens(self, name: str) -> int:
        """Return ``prompt_tokens`` or ``completion_tokens``; 0 if the endpoint did not report it."""
        return _count(self.usage.get(name))

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the endpoint's cache."""
        details = self.usage.get("prompt_tokens_details")
        return _count(details.get("cached_tokens")) if isinstance(details, dict) else 0

    def take(self, data: dict[str, Any]) -> None:
        """Add a whole answer, or one piece of a stream."""
        if isinstance(data.get("usage"), dict):
            self.usage = data["usage"]
        if isinstance(data.get("model"), str):
            self.model = data["model"]
        choices = data.get("choices")
        for place, choice in enumerate(choices if isinstance(choices, list) else ()):
            if isinstance(choice, dict):
                index = choice.get("index")
                self._choice(index if isinstance(index, int) else place, choice)

    def _choice(self, index: int, choice: dict[str, Any]) -> None:
        known = self.choices.setdefault(index, {})
        if isinstance(choice.get("message"), dict):
            known["message"] = {key: value for key, value in choice["message"].items() if value is not None}
        if isinstance(choice.get("delta"), dict):
            _grow(known.setdefault("message", {}), choice["delta"])
        if isinstance(choice.get("text"), str):
            known["text"] = known.get("text", "") + choice["text"]
        if choice.get("finish_reason"):
            known["finish_reason"] = choice["finish_reason"]


def whole_answer(content: bytes) -> Answer | None:
    """Parse the answer in a body; return ``None`` if the body is not a JSON object."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    answer = Answer()
    answer.take(data)
    return answer


class EventStream:
    """Parses a stream of server-sent events while it arrives.

    Attributes:
        answer: Answer assembled so far.
        broken: Whether an event was not JSON.
        error: Error that an event reported.
    """

    def __init__(self, *, hide_usage: bool = False) -> None:
        self.answer = Answer()
        self.broken = False
        self.error = ""
        self._hide_usage = hide_usage
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """Add a piece; return the bytes that the client may get now.

        Holds back an incomplete event if the usage is hidden; otherwise nothing.
        """
        unseen = max(0, len(self._rest) - 3)  # a blank line has at most four bytes
        self._rest += piece
        passed = b""
        while mark := _BLANK_LINE.search(self._rest, unseen):
            event, self._rest, unseen = self._rest[: mark.end()], self._rest[mark.end() :], 0
            if not (self._take(event) and self._hide_usage):
                passed += event
        return passed if self._hide_usage else piece

    def end(self) -> bytes:
        """Return the bytes that were held back when the stream ended within an event."""
        rest, self._rest = self._rest, b""
        if rest.strip():
            self._take(rest)
        return rest if self._hide_usage else b""

    def _take(self, event: bytes) -> bool:
        """Parse one event; return whether it only reports the usage."""
        lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
        text = b"\n".join(lines)
        if not text:
            return False
        if text == DONE:
            self.answer.done = True
            return False
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            self.broken = True
            return False
        if not isinstance(data, dict):
            return False
        if data.get("error"):
            self.error = json.dumps(data["error"], ensure_ascii=False)
        self.answer.take(data)
        return data.get("choices") == [] and isinstance(data.get("usage"), dict)


def _grow(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if value is None:
            continue
        if key == "tool_calls" and isinstance(value, list):
            _grow_calls(message.setdefault("tool_calls", []), value)
        elif key == "function_call" and isinstance(value, dict):  # the older form of one call
            call = message.setdefault("function_call", {"name": "", "arguments": ""})
            call["name"] = call["name"] or _said(value.get("name"))
            call["arguments"] += _said(value.get("arguments"))
        elif key in _GROWING and isinstance(value, str):
            message[key] = message.get(key, "") + value
        else:
            message.setdefault(key, value)


def _grow_calls(calls: list[dict[str, Any]], deltas: list[Any]) -> None:
    for delta in deltas:
        if not isinstance(delta, dict):
            continue
        number = delta.get("index")
        index = number if isinstance(number, int) else len(calls)
        while len(calls) <= index < len(calls) + 64:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        if not 0 <= index < len(calls):
            continue
        call = calls[index]
        call["id"] = call["id"] or _said(delta.get("id"))
        function = delta.get("function")
        if isinstance(function, dict):
            known = call["function"]
            known["name"] = known["name"] or _said(function.get("name"))
            known["arguments"] += _said(function.get("arguments"))


def _said(value: Any) -> str:
    """Return a text unchanged, anything else as JSON: some servers send arguments as one object."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value <= _MOST_TOKENS else 0
