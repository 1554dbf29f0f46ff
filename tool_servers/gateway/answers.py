"""What an endpoint answered, whole or in pieces, in one form for the log."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_GROWING = frozenset({"content", "reasoning_content", "reasoning", "refusal", "text"})
"""Keys of a delta whose texts follow one another; others are said once."""
DONE = b"[DONE]"
_MOST_TOKENS = 10_000_000
"""Of a call; more is a mistake of the endpoint's."""


@dataclass
class Answer:
    """One answer, as far as it is known.

    Attributes:
        choices: By their index.
        usage: As the endpoint reported it.
        done: The end of a stream was marked.
    """

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    done: bool = False

    @property
    def finished(self) -> bool:
        """Whether the end was said, by a mark or by a reason of every choice."""
        ends = [choice.get("finish_reason") for choice in self.choices.values()]
        return self.done or (bool(ends) and all(ends))

    @property
    def in_order(self) -> tuple[dict[str, Any], ...]:
        """The choices by their index."""
        return tuple(self.choices[index] for index in sorted(self.choices))

    def tokens(self, name: str) -> int:
        """``prompt_tokens``, ``completion_tokens``; 0 when the endpoint did not say."""
        return _count(self.usage.get(name))

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that the endpoint had in its cache."""
        details = self.usage.get("prompt_tokens_details")
        return _count(details.get("cached_tokens")) if isinstance(details, dict) else 0

    def take(self, data: dict[str, Any]) -> None:
        """A whole answer, or one piece of a stream."""
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
    """The answer in a body, ``None`` when it is no JSON object."""
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
    """Takes a stream of server-sent events apart while it comes.

    Attributes:
        answer: Put together from what came so far.
        broken: An event held no JSON.
        error: An error that an event reported.
    """

    def __init__(self, *, hide_usage: bool = False) -> None:
        self.answer = Answer()
        self.broken = False
        self.error = ""
        self._hide_usage = hide_usage
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """What of it, and of what was held back, the client may have now.

        Nothing is held back unless events are hidden; then only the begun event is.
        """
        unseen = max(0, len(self._rest) - 3)  # a mark has at most four bytes
        self._rest += piece
        passed = b""
        while mark := _BLANK_LINE.search(self._rest, unseen):
            event, self._rest, unseen = self._rest[: mark.end()], self._rest[mark.end() :], 0
            if not (self._take(event) and self._hide_usage):
                passed += event
        return passed if self._hide_usage else piece

    def end(self) -> bytes:
        """What was held back when the stream ends within an event."""
        rest, self._rest = self._rest, b""
        if rest.strip():
            self._take(rest)
        return rest if self._hide_usage else b""

    def _take(self, event: bytes) -> bool:
        """Read one event; whether it only tells the usage."""
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
    """A text as it is; some servers say arguments as an object, whole and at once."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value <= _MOST_TOKENS else 0
