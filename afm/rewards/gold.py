"""The gold answers of a row, in whichever of the published layouts they come."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

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
