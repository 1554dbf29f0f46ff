"""What a model says, apart from what it reasoned before: servers without a reasoning parser send both as one text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_TAG = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_OBJECT = re.compile(r'\{\s*"')
_MOST_BROKEN = 200
_DECODER = json.JSONDecoder(strict=False)


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
    while broken < _MOST_BROKEN and (found := _OBJECT.search(text, place)):
        data, start = None, found.start()
        try:
            data, place = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            place, broken = start + 1, broken + 1
            if isinstance(error, json.JSONDecodeError) and not inside_broken:
                place = max(place, error.pos)
        yield data, start, place
