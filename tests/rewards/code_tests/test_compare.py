"""Which outputs and values count as right."""

from __future__ import annotations

from typing import Any

import pytest

from afm.rewards.code_tests.compare import absolute_tolerance, layout_matters, same_output, same_value


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ("1 2\n3", "1\n2 3 \n", True),
        ("", "\n", True),
        ("0.3333333", "0.33333333333", True),
        ("1000000.4", "1000000.0", True),  # relative: 4e-7
        ("5.0", "5", True),
        ("3 3", "3", False),
        ("yes", "YES", False),
        ("1000000001", "1000000000", False),  # a whole number is exact, whatever the tolerance
        ("nan", "0.5", False),
        ("1e999", "1.5", False),
        ("3e999", "1.5e999", False),  # both overflow
        ("1_0.5", "10.5", False),
        ("٣.5", "3.5", False),
        ("9" * 5000 + ".0", "1.5", False),
        *(("101", "00101", False), ("-7", "-07", False)),  # zeros that are expected are part of a word
    ],
)
def test_outputs(given: str, expected: str, same: bool) -> None:
    assert same_output(given, expected, 1e-6) is same


def test_without_tolerance_numbers_are_text() -> None:
    assert not same_output("0.50", "0.5", 0)
    assert same_output("0.5 ", "0.5", 0)


def test_the_way_a_number_is_written_can_be_the_task() -> None:
    assert layout_matters([("1.012", "1.012"), ("12.340", "12.34"), ("0.000", "0")], 1e-6)
    assert not layout_matters([("1.012", "1.012"), ("2", "3")], 1e-6)
    assert not layout_matters([("1.0", "1.0")], 1e-6)  # the task is to copy
    assert not layout_matters([], 1e-6)


@pytest.mark.parametrize(
    ("expected", "absolute"),
    [
        (["0.0000004", "1e-7 3"], 0.0),
        ([[4e-7], {"a": [-1e-9]}], 0.0),
        (["0.0000004", "0.5"], 1e-6),
        (["0.0"], 1e-6),  # 1e-9 for nothing is right
        ([[3, "x", None]], 1e-6),
        ([], 1e-6),
    ],
)
def test_the_tolerance_is_relative_where_everything_is_smaller_than_it(
    expected: list[Any], absolute: float
) -> None:
    assert absolute_tolerance(expected, 1e-6) == absolute


def test_without_absolute_tolerance_nothing_is_not_a_little() -> None:
    assert not same_output("0", "0.0000004", 1e-6, 0.0)
    assert same_output("4.0000001e-7", "0.0000004", 1e-6, 0.0)
    assert same_output("0", "0.0000004", 1e-6)
    assert not same_value(0, 4e-7, 1e-6, 0.0)
    assert not same_value([{"a": 0.0}], [{"a": 4e-7}], 1e-6, 0.0)


@pytest.mark.parametrize(
    ("given", "expected", "same"),
    [
        ([(1, 2)], [[1, 2]], True),
        (0.1 + 0.2, 0.3, True),
        (1, True, True),  # Python's own opinion, and LiveCodeBench's
        ({1: "a"}, {"1": "a"}, True),
        (10**400, 10**400, True),
        ([1], [1, 2], False),
        (None, 0, False),
        (0.5, True, False),
        (10**400, 1.5, False),
        (float("nan"), 1.0, False),
        ({1}, [1], False),
        ({"1": "a", 1: "b"}, {"1": "a"}, False),
        (10**9 + 1, 10**9, False),
        ({10**9999: 1}, {"a": 1}, False),  # a key of more digits than Python prints
        ([{(1, 10**9999): 1}], [{"a": 1}], False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values(given: object, expected: object, same: bool) -> None:
    assert same_value(given, expected, 1e-6) is same
