"""Plain values survive the conversion to JSON and back exactly. Values with their own code are rejected."""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque, namedtuple
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afm.rewards.code_tests.inside.plain import NotPlainError, decode, encode

Point = namedtuple("Point", "x y")


VIEWS = (dict.keys, dict.values, dict.items)


class Seven(IntEnum):
    """A subclass of int."""

    VALUE = 7


class Liar(int):
    """An int that equals everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


numbers = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
scalars = st.none() | st.booleans() | st.text() | st.binary() | numbers
hashable = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5
)
values = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.sets(hashable, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@given(values)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Counter("aab"), {"a": 2, "b": 1}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (Point(1, 2), (1, 2)),
        (Seven.VALUE, 7),
        (Liar(3), 3),
        (range(2, 9, 3), range(2, 9, 3)),
        (2**200, 2**200),
        (-(10**5000), -(10**5000)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_subclasses_count_as_their_plain_base(value: Any, plain: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert plain == back
    assert type(back) is type(plain)


def test_numbers_and_arrays_of_numpy_count_as_plain() -> None:
    numpy = pytest.importorskip("numpy")
    back = decode(encode([numpy.int64(3), numpy.float32(0.5), numpy.bool_(True), numpy.arange(3)]))
    assert repr(back) == "[3, 0.5, True, [0, 1, 2]]"


@pytest.mark.parametrize("view", [deque([1, (2,)]), *(way({3: [1], 1: [2]}) for way in VIEWS)])
def test_deques_and_views_of_dicts_are_what_they_were(view: Any) -> None:
    back = decode(json.loads(json.dumps(encode(view))))
    assert (type(back), list(back)) == (type(view), list(view))


def test_iterators_and_nan() -> None:
    assert list(decode(encode(iter([1, (2,)])))) == [1, (2,)]
    assert decode(encode(float("nan"))) != decode(encode(float("nan")))


@pytest.mark.parametrize("value", [object(), [len], {"a": lambda: 1}, int])
def test_objects_are_refused(value: Any) -> None:
    with pytest.raises(NotPlainError):
        encode(value)


@pytest.mark.parametrize(
    "data", [{"set": [[1]]}, {"x": 1}, {}, {"int": "z"}, {"range": []}, {"dict": [1]}, {"a": 1, "b": 2}]
)
def test_malformed_data_is_an_ordinary_error(data: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode(data)
