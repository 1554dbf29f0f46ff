"""Gold answers in every layout that published rows use."""

from __future__ import annotations

from typing import Any

import pytest

from afm.errors import DataError
from afm.rewards.text_match import gold_answers


class Array:
    """What a parquet reader gives for a list column."""

    def tolist(self) -> list[str]:
        return ["a", "b"]


@pytest.mark.parametrize(
    ("ground_truth", "expected"),
    [
        ("204", ("204",)),
        (204, ("204",)),
        (0.5, ("0.5",)),
        (["a", "b"], ("a", "b")),
        (Array(), ("a", "b")),
        ({"target": ["a", "b"]}, ("a", "b")),
        ({"target": Array(), "question": "q"}, ("a", "b")),
        ('{"target": ["a", "b"], "question": "q"}', ("a", "b")),
        ('["34"]', ("34",)),
        ("[1, 2]", ("[1, 2]",)),  # an interval
        ("{3}", ("{3}",)),  # a set
        ('{"other": 1}', ('{"other": 1}',)),
        (["", "a"], ("a",)),
    ],
)
def test_layouts(ground_truth: Any, expected: tuple[str, ...]) -> None:
    assert gold_answers(ground_truth) == expected


@pytest.mark.parametrize("ground_truth", [None, "", "  ", [], {"target": []}, {"answer": "a"}, True])
def test_no_answer_is_an_error(ground_truth: Any) -> None:
    with pytest.raises(DataError, match="holds no answer; expected"):
        gold_answers(ground_truth)
