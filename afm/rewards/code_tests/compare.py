"""Compare a program's output or return value with the expected one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"[+-]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})(?:[eE][+-]?\d{1,4})?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_PADDED = re.compile(r"[+-]?0\d", re.ASCII)


def same_output(actual: str, expected: str, tolerance: float, absolute: float | None = None) -> bool:
    """Return whether two outputs are equal word by word, regardless of whitespace.

    An expected number with a fraction accepts numbers within ``tolerance``, absolute or relative. Whole numbers must have
    the same value, and words the same letters. Expected digits with leading zeros (``00101``) are a word.

    Args:
        absolute: The absolute tolerance, if it differs from the relative one.
    """
    left, right = actual.split(), expected.split()
    if left == right:
        return True
    if len(left) != len(right) or not tolerance:
        return False
    absolute = tolerance if absolute is None else absolute
    return all(_same_word(*pair, tolerance, absolute) for pair in zip(left, right, strict=True))


def absolute_tolerance(expected: Iterable[Any], tolerance: float) -> float:
    """Return ``tolerance``, or 0 if no expected number with a fraction is larger, because then zeros would pass."""
    largest = max((abs(number) for item in expected for number in _fractions(item)), default=math.inf)
    return 0.0 if 0 < largest <= tolerance else tolerance


def layout_matters(cases: list[tuple[str, str]], tolerance: float) -> bool:
    """Return whether a program that copies its input would pass all ``cases`` only because of the tolerance.

    The task is then about how a number is written (print 12.340 without the zero), and only equal text passes.
    """
    if not cases or all(actual.split() == expected.split() for actual, expected in cases):
        return False
    return all(same_output(actual, expected, tolerance) for actual, expected in cases)


def same_value(actual: Any, expected: Any, tolerance: float, absolute: float | None = None) -> bool:
    """Return whether values are equal. ``expected`` is JSON data: tuples count as lists, fractions have a tolerance."""
    absolute = tolerance if absolute is None else absolute
    if isinstance(actual, tuple):
        actual = list(actual)
    if isinstance(expected, list):
        if not isinstance(actual, list) or len(actual) != len(expected):
            return False
        return all(same_value(*pair, tolerance, absolute) for pair in zip(actual, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or len(actual) != len(expected):
            return False
        try:
            named = {key if isinstance(key, str) else repr(key): value for key, value in actual.items()}
        except ValueError:  # an integer with more digits than Python prints
            return False
        return named.keys() == expected.keys() and all(
            same_value(named[key], value, tolerance, absolute) for key, value in expected.items()
        )
    if isinstance(expected, bool) or isinstance(actual, bool):
        return isinstance(actual, bool | int) and actual == expected
    if isinstance(expected, float) and isinstance(actual, int | float):
        return actual == expected or _close(actual, expected, tolerance, absolute)
    return type(actual) in (str, int, float, type(None)) and bool(actual == expected)


def _fractions(expected: Any) -> Iterator[float]:
    """Yield the numbers to which the tolerance applies."""
    if isinstance(expected, float):
        yield expected
    elif isinstance(expected, str):
        for word in expected.split():
            if _NUMBER.fullmatch(word) and not _WHOLE.fullmatch(word) and not _PADDED.match(word):
                yield float(word)
    elif isinstance(expected, list | dict):
        for item in expected.values() if isinstance(expected, dict) else expected:
            yield from _fractions(item)


def _same_word(actual: str, expected: str, tolerance: float, absolute: float) -> bool:
    if actual == expected:
        return True
    if not _NUMBER.fullmatch(actual) or not _NUMBER.fullmatch(expected):
        return False
    if _PADDED.match(expected):
        return False
    if _WHOLE.fullmatch(expected):
        return Decimal(actual) == Decimal(expected)
    return _close(float(actual), float(expected), tolerance, absolute)


def _close(actual: float, expected: float, tolerance: float, absolute: float) -> bool:
    try:
        return math.isfinite(actual) and math.isclose(actual, expected, rel_tol=tolerance, abs_tol=absolute)
    except OverflowError:  # an int beyond every float
        return False
