"""Values of published rows: cells of tables that cannot be decoded, and what tasks may hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any

from afm.errors import DataError

_MOST_LEVELS = 64
"""Lists and objects within each other; laying rows aside recurses, and no published row comes near."""


def batch_rows(batch: Any) -> Iterator[dict[str, Any] | DataError]:
    """Rows of an Arrow batch; a :class:`DataError` stands in place of one with a cell that cannot be decoded."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):  # bytes that are no UTF-8, years beyond 9999
        for place in range(batch.num_rows):
            try:
                yield from batch.slice(place, 1).to_pylist()
            except (ValueError, OverflowError) as error:
                yield DataError(f"a value cannot be decoded: {error}")


def plain_value(value: Any, name: str, level: int = 0) -> Any:
    """``value`` as JSON can hold it: dates, times and decimal numbers as texts.

    Args:
        name: Of the value, for the error.

    Raises:
        DataError: It holds bytes, or more levels than are read.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes):
        raise DataError(f"`{name}`: bytes, expected texts, numbers, lists and objects")
    if level == _MOST_LEVELS:
        raise DataError(f"`{name}`: more than {_MOST_LEVELS} lists and objects within each other")
    if isinstance(value, Mapping):
        return {key: plain_value(item, name, level + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item, name, level + 1) for item in value]
    return value


def checked_gold(value: Any, name: str) -> Any:
    """As :func:`plain_value`, for a gold answer.

    Raises:
        DataError: It is no number, where a table has a gap for instance; or as :func:`plain_value`.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"`{name}`: expected an answer, got {value}")
    return plain_value(value, name)
