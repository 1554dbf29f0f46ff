"""The gold answers of a row, in whichever of the published layouts they come."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from afm.errors import DataError


def gold_answers(ground_truth: Any) -> tuple[str, ...]:
    """Accepted answers: a text, a number, a list, ``{"target": ...}``, or one of these as a JSON string.

    A text is read as JSON only when that gives a mapping with ``target`` or a list of texts, because
    ``[1, 2]`` and ``{3}`` are mathematical answers too.

    Raises:
        DataError: There is no answer in it.
    """
    found = tuple(text for text in _texts(ground_truth) if text.strip())
    if not found:
        raise DataError(
            f"ground truth {_short(ground_truth)} holds no answer; expected a text, a list of texts "
            'or {"target": [...]}'
        )
    return found


def kind_of_gold(ground_truth: Any) -> Literal["tests", "result"] | None:
    """Whether a row's gold is tests of a program or a result; ``None`` where its look does not say. Nothing is unpacked."""
    value = ground_truth.tolist() if hasattr(ground_truth, "tolist") else ground_truth
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return "result"
    if isinstance(value, Mapping):
        return kind_of_gold(value["target"]) if "target" in value else "tests"
    if not isinstance(value, list | tuple):
        return "result"
    if value and all(isinstance(one, Mapping) for one in value):
        return "tests"
    texts = [one for one in value if isinstance(one, str)]
    if len(texts) < len(value) or any(map(is_literal, texts)):
        return "result"
    return "tests" if any("assert" in one for one in texts) else None


def is_literal(text: str) -> bool:
    """Whether a text is a mere value in Python, which as a test every program would pass."""
    try:
        ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return True


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        return _of_text(value)
    if isinstance(value, bool) or value is None:
        return ()
    if isinstance(value, int | float):
        return (str(value),)
    if isinstance(value, Mapping):
        return _texts(value.get("target"))
    if hasattr(value, "tolist"):  # an array, as parquet readers give it
        return _texts(value.tolist())
    if isinstance(value, Iterable):
        return [text for item in value for text in ([item] if isinstance(item, str) else _texts(item))]
    return ()


def _of_text(text: str) -> Iterable[str]:
    if text.lstrip()[:1] in ("{", "["):
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            return (text,)
        if isinstance(data, dict) and "target" in data:
            return _texts(data["target"])
        if isinstance(data, list) and data and all(isinstance(item, str) for item in data):
            return data
    return (text,)


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
