"""Convert plain Python values to JSON and back exactly: a program's return value, without any of its code.

JSON's own types stand for themselves. Any other value is an object with one key, the tag: ``int`` (hexadecimal if
large), ``float`` (``inf``, ``nan``), ``complex``, ``bytes``, ``tuple``, ``set``, ``frozenset``, ``dict`` (pairs), its
``keys``, ``values`` and ``items``, ``deque``, ``range``, ``iterator``. Subclasses count as their plain base.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

ARRAYS = "num" + "py"
"""Not spelled out: a sandbox may pick a large warm interpreter for a program that mentions a package."""
_EXACT = 1 << 53
_LONGEST_ITERATOR = 100_000


class NotPlainError(ValueError):
    """A value is not plain data. The message is the name of its type."""


def encode(value: Any) -> Any:
    """Convert ``value`` to JSON data.

    Raises:
        NotPlainError: Some part is not plain.
        RecursionError: It is nested too deeply.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind, encoder in _ENCODERS:
        if isinstance(value, kind):
            return encoder(value)
    name = type(value).__name__
    if type(value).__module__.partition(".")[0] == ARRAYS:
        return encode(value.tolist())
    if hasattr(value, "__next__"):
        return {"iterator": [encode(item) for item in itertools.islice(value, _LONGEST_ITERATOR)]}
    raise NotPlainError(name)


def _integer(value: int) -> Any:
    value = int.__index__(value)
    return value if -_EXACT < value < _EXACT else {"int": int.__format__(value, "x")}


def _float(value: float) -> Any:
    text = float.__repr__(value)
    return {"float": text} if text.strip("-") in ("inf", "nan") else float(text)


def _items(tag: str) -> Any:
    return lambda value: {tag: [encode(item) for item in value]}


_ENCODERS: tuple[tuple[type, Any], ...] = (
    (int, _integer),
    (float, _float),
    (str, lambda value: str.__str__(value)),
    (list, lambda value: [encode(item) for item in list.__iter__(value)]),
    (tuple, _items("tuple")),
    (dict, lambda value: {"dict": [[encode(key), encode(item)] for key, item in dict.items(value)]}),
    (type({}.keys()), _items("keys")),
    (type({}.values()), _items("values")),
    (type({}.items()), _items("items")),
    (deque, _items("deque")),
    (set, _items("set")),
    (frozenset, _items("frozenset")),
    (bytes, lambda value: {"bytes": bytes.hex(value)}),
    (complex, lambda value: {"complex": [_float(value.real), _float(value.imag)]}),
    (range, lambda value: {"range": [value.start, value.stop, value.step]}),
)


def has_nan(data: Any) -> bool:
    """Return whether data of :func:`encode` contains a NaN."""
    if isinstance(data, dict):
        return data.get("float") == "nan" or any(map(has_nan, data.values()))
    return any(map(has_nan, data)) if isinstance(data, list) else bool(data != data)


def decode(data: Any) -> Any:
    """Return the value that :func:`encode` converted.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: ``data`` is not the output of :func:`encode`.
    """
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((tag, inner),) = data.items()
    return _DECODERS[tag](inner)


_DECODERS: dict[str, Any] = {
    "int": lambda inner: int(inner, 16),
    "float": lambda inner: float({"inf": "inf", "-inf": "-inf", "nan": "nan"}[inner]),
    "complex": lambda inner: complex(*(decode(part) for part in inner)),
    "bytes": bytes.fromhex,
    "tuple": lambda inner: tuple(decode(item) for item in inner),
    "set": lambda inner: {decode(item) for item in inner},
    "frozenset": lambda inner: frozenset(decode(item) for item in inner),
    "dict": lambda inner: {decode(key): decode(item) for key, item in inner},
    "keys": lambda inner: dict.fromkeys(decode(item) for item in inner).keys(),
    "values": lambda inner: dict(enumerate(decode(item) for item in inner)).values(),
    "items": lambda inner: dict(decode(item) for item in inner).items(),
    "deque": lambda inner: deque(decode(item) for item in inner),
    "range": lambda inner: range(*inner),
    "iterator": lambda inner: iter([decode(item) for item in inner]),
}
