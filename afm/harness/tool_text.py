"""Parse tool calls in sampled text, and select the part of the text that a client sees during sampling."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from afm.harness.requests import json_text

_OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""Hermes and Qwen, Mistral, Llama 3."""
_BETWEEN = re.compile(r"(?:\s|</tool_call>|<tool_call>|;|,(?=\s*\{))*")
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class TextCall:
    """One tool call in sampled text. ``arguments`` is the JSON text of an object."""

    name: str
    arguments: str


def split_calls(text: str, offered: Collection[str]) -> tuple[str, tuple[TextCall, ...]]:
    """Return the text before the first tool call, and the calls. If a call is broken, return the whole text and no calls.

    Supported forms are ``<tool_call>{"name", "arguments"}</tool_call>`` (Hermes and Qwen), ``[TOOL_CALLS] [...]``
    (Mistral), and an object with ``name`` and ``parameters``, also after ``<|python_tag|>`` (Llama 3). Without a tag
    before it, the object has to name one of the ``offered`` tools.
    """
    found = [at for mark in _OPENINGS if (at := text.find(mark)) >= 0]
    if not found:
        bare = text.strip()
        calls = _calls(bare, offered) if bare.startswith('{"') else None
        return ("", calls) if calls else (text, ())
    begin = min(found)
    mark = next(mark for mark in _OPENINGS if text.startswith(mark, begin))
    calls = _calls(text[begin + len(mark) :])
    return (text[:begin].rstrip(), calls) if calls else (text, ())


def _calls(text: str, offered: Collection[str] | None = None) -> tuple[TextCall, ...]:
    """Parse the calls at the beginning of a text and ignore text after them. Return none if one is broken."""
    calls: list[TextCall] = []
    at = _end_of_gap(text, 0)
    while at < len(text) and text[at] in "{[":
        try:
            value, at = _DECODER.raw_decode(text, at)
            calls += _read(value, offered)
        except (ValueError, RecursionError):
            return ()
        at = _end_of_gap(text, at)
    return tuple(calls)


def _end_of_gap(text: str, at: int) -> int:
    match = _BETWEEN.match(text, at)
    return match.end() if match else at


def _read(value: Any, offered: Collection[str] | None) -> Iterator[TextCall]:
    """Yield the calls in a JSON value. Raises ValueError if it is not a call that can be written again as JSON.

    Args:
        offered: If given, a call has one of these names, and arguments.
    """
    if isinstance(value, list):
        for item in value:
            yield from _read(item, offered)
        return
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no call")
    name = value["name"]
    arguments = value.get("arguments", value.get("parameters", {} if offered is None else None))
    if not isinstance(arguments, dict) or (offered is not None and name not in offered):
        raise ValueError("no arguments, or no tool of this name")
    name.encode()
    yield TextCall(name, json_text(arguments, allow_nan=False))


class VisibleText:
    """Filter for streamed text. It ends the visible text at a stop string or, if tools are offered, at a tool call.

    It holds back only a suffix that may be the beginning of one of these.

    Args:
        stop: Strings that end the visible text. They are not shown.
        tools: Whether tool calls end it too.
    """

    def __init__(self, stop: Sequence[str], *, tools: bool) -> None:
        self._marks = (*stop, *(_OPENINGS if tools else ()))
        self._tools = tools
        self._rest = ""
        self._begun = self._over = False

    def feed(self, piece: str) -> str:
        """Take the next piece and return the text that can be shown now."""
        if self._over:
            return ""
        self._rest += piece
        if self._tools and not self._begun:  # a text that starts as a JSON object may be a call
            if not self._rest.strip() or self._rest.lstrip().startswith("{"):
                return ""
            self._begun = True
        ends = [at for mark in self._marks if (at := self._rest.find(mark)) >= 0]
        if ends:
            shown, self._over = self._rest[: min(ends)], True
            return shown.rstrip() if self._tools else shown
        held = max((_overlap(self._rest, mark) for mark in self._marks), default=0)
        shown = self._rest[: len(self._rest) - held]
        if self._tools:
            shown = shown.rstrip()  # white space before a call is not shown
        self._rest = self._rest[len(shown) :]
        return shown


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``mark``."""
    return next(
        (size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0
    )


def until_stop(text: str, stop: Sequence[str]) -> str:
    """Return ``text`` up to its first stop string."""
    return text[: min((at for item in stop if (at := text.find(item)) >= 0), default=len(text))]
