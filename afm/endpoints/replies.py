"""What a chat endpoint replies: whole or cut off, what it took, and the text apart from the reasoning before it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from afm.endpoints.pace import TryAgainError
from afm.trajectory.observation import whole_characters

CHARACTERS_PER_TOKEN = 3
"""Rather few, so that an estimate is rather too large."""
_MOST_TOKENS = 10_000_000  # of one request; more is a mistake of the server's
_SHOWN = 40

_TAG = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_OBJECT = re.compile(r'\{\s*"')
_MOST_BROKEN = 200
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One reply.

    Attributes:
        text: What the model said.
        prompt_tokens, completion_tokens: As the server reports them; ``None`` when it does not.
        total_tokens: The same; some servers report nothing else.
        calls: Name and arguments of each tool call, where the request offered tools.
        finish: The finish reason: ``stop``, or what the server gave in its place.
    """

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    calls: tuple[tuple[str, str], ...] = ()
    finish: str = "stop"

    @property
    def metered(self) -> bool:
        """Whether the server reported what prompt and reply took."""
        return None not in (self.prompt_tokens, self.completion_tokens)

    def usage(self, body: Mapping[str, Any]) -> tuple[int, int]:
        """Tokens of prompt and reply; estimated from the length of ``body`` and text where the server does not tell."""
        prompt = expected_tokens(body)[0] if self.prompt_tokens is None else self.prompt_tokens
        if self.completion_tokens is not None:
            return prompt, self.completion_tokens
        if self.total_tokens is not None:
            return min(prompt, self.total_tokens), max(0, self.total_tokens - prompt)
        return prompt, len(self.text) // CHARACTERS_PER_TOKEN + 1


class UnusableReplyError(TryAgainError):
    """A ``reply`` came and cost something, but it is not complete or not an assistant's."""

    def __init__(self, reason: str, reply: ChatReply) -> None:
        super().__init__(reason)
        self.reply = reply


def expected_tokens(body: Mapping[str, Any]) -> tuple[int, int]:
    """About how many tokens a request will take, rather too many: of its prompt, and of its reply."""
    prompt = sum(len(message["content"]) for message in body["messages"]) // CHARACTERS_PER_TOKEN
    return prompt, int(body.get("max_tokens") or body.get("max_completion_tokens") or 0)


def read_reply(body: bytes, *, with_tools: bool = False, finishes: Collection[str] = ("stop",)) -> ChatReply:
    """The reply in a server's answer.

    Args:
        with_tools: The request offered tools, so tool calls may stand in place of a text.
        finishes: Finish reasons at which a reply is taken as it is.

    Raises:
        TryAgainError: There is no chat completion.
        UnusableReplyError: The reply ended for another reason, or is not an assistant's.
    """
    try:
        data = json.loads(body)
        [choice] = data["choices"]
        message, finish = choice["message"], choice.get("finish_reason")
        text = message.get("content") if with_tools else message["content"]
        role = message.get("role", "assistant")
        usage = data.get("usage") or {}
        prompt, completion, total = (
            _tokens(usage.get(f"{kind}_tokens")) for kind in ("prompt", "completion", "total")
        )
        calls = tuple(map(_call, message.get("tool_calls") or ())) if with_tools else ()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TryAgainError("the answer is no chat completion") from None
    if finish is None or (calls and finish == "tool_calls"):
        finish = "stop"
    whole = whole_characters(text) if isinstance(text, str) else ""
    reply = ChatReply(whole, prompt, completion, total, calls, str(finish))
    if role != "assistant":
        raise UnusableReplyError(
            f"the reply is of the role {str(role)[:_SHOWN]!r}, expected 'assistant'", reply
        )
    missing = not isinstance(text, str) and not calls and reply.finish == "stop"
    if missing or reply.finish not in finishes:
        reason = f"the reply is incomplete (finish reason {choice.get('finish_reason')!r:.{_SHOWN}})"
        raise UnusableReplyError(reason, reply)
    return reply


def _call(item: Mapping[str, Any]) -> tuple[str, str]:
    function = item["function"]
    return str(function["name"]), whole_characters(str(function["arguments"]))


def _tokens(count: Any) -> int | None:
    return count if isinstance(count, int) and 0 <= count <= _MOST_TOKENS else None


class UnfinishedReasoningError(ValueError):
    """A text ends within its reasoning, so that it holds no reply yet."""


def without_reasoning(text: str) -> str:
    """``text`` without ``<think>...</think>``, and without all that stands before a ``</think>`` that was never opened.

    Tags inside a whole JSON object are quoted ones and count as its text. ``<thinking>`` is taken as well.

    Raises:
        UnfinishedReasoningError: A ``<think>`` is never closed.
    """
    quoted = _spans(text) if _TAG.search(text) else []
    kept: list[str] = []
    begin, opened = 0, False
    for tag in _TAG.finditer(text):
        if any(start < tag.start() < end for start, end in quoted):
            continue
        if not tag[1]:
            if not opened:
                kept.append(text[begin : tag.start()])
            opened = True
            continue
        if not opened:
            kept.clear()
        begin, opened = tag.end(), False
    if opened:
        raise UnfinishedReasoningError("its reasoning is not finished, so there is no reply yet")
    return "".join((*kept, text[begin:]))


def objects_in(text: str) -> Iterator[dict[str, Any] | None]:
    """The JSON objects in ``text`` that have keys, in its order; ``None`` for each that is broken or not complete.

    Objects inside another one are parts of it, also where that one is broken after them. What stands between objects
    (words, a fence) is passed over.
    """
    for data, _, _ in _scanned(text, inside_broken=False):
        yield data


def _spans(text: str) -> list[tuple[int, int]]:
    return [(start, end) for data, start, end in _scanned(text, inside_broken=True) if data is not None]


def _scanned(text: str, *, inside_broken: bool) -> Iterator[tuple[dict[str, Any] | None, int, int]]:
    """Objects with the places where they begin and end; ``inside_broken``: what looks like one inside a broken one counts, too."""
    place = broken = 0
    while broken < _MOST_BROKEN and (match := _OBJECT.search(text, place)):
        data, start = None, match.start()
        try:
            data, place = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            place, broken = start + 1, broken + 1
            if isinstance(error, json.JSONDecodeError) and not inside_broken:
                place = max(place, error.pos)
        yield data, start, place
