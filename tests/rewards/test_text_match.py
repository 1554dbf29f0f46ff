"""Exact match, token F1 and substring match: normalisation, which answers count, and gold answers in every layout."""

from __future__ import annotations

from typing import Any

import pytest
from answered import answered

from afm.errors import DataError
from afm.rewards.text_match import (
    ExactMatch,
    MatchVariant,
    Substring,
    TokenF1,
    gold_answers,
    normalised,
    token_f1,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Beatles!", "beatles"),
        ("an apple a day", "apple day"),
        ("  \n", ""),
        ("Café—Zürich", "café—zürich"),
    ],
)
def test_normalisation(text: str, expected: str) -> None:
    assert normalised(text) == expected


@pytest.mark.parametrize(
    ("answer", "gold", "training", "evaluation"),
    [
        ("Paris", ["paris"], 1, 1),
        ("Paris | Lyon", ["Paris"], 0, 1),
        ("Lyon | Paris", ["Paris"], 0, 0),
        ("Paris", {"target": ["London"]}, 0, 0),
        ("the  THE", "The The", 1, 1),  # nothing is left of it: compared as it stands
        ("the", ["The The"], 0, 0),
        ("...", ["?", "Paris"], 0, 0),
        ("", ["Paris"], 0, 0),
    ],
)
async def test_variants(answer: str, gold: object, training: int, evaluation: int) -> None:
    row = answered("mhqa", "nq", answer, gold)
    assert (await ExactMatch(MatchVariant.TRAINING).judge(row)).score == training
    assert (await ExactMatch(MatchVariant.EVALUATION).judge(row)).score == evaluation


async def test_a_row_without_gold_answer_has_no_score() -> None:
    part = await ExactMatch().judge(answered("mhqa", "nq", "Paris", []))
    assert part.score is None
    assert "holds no answer" in part.evidence


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("the Beatles", "Beatles", 1.0),
        ("George Washington Carver", "George Washington", 0.8),  # precision 2/3, recall 1
        ("no no no", "no", 0.5),  # precision 1/3, recall 1
        ("Paris", "London", 0.0),
        ("...", "the", 0.0),
        ("a", "The The", 0.0),
    ],
)
def test_token_f1(answer: str, gold: str, expected: float) -> None:
    assert token_f1(answer, gold) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("variant", "expected"), [(MatchVariant.TRAINING, 0.0), (MatchVariant.EVALUATION, 0.8)]
)
async def test_f1_of_several_answers(variant: MatchVariant, expected: float) -> None:
    given = answered("mhqa", "nq", "George Washington Carver | nobody", ["x", "George Washington"])
    assert (await TokenF1(variant).judge(given)).score == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [
        ("It was the Eiffel Tower.", ["Eiffel tower"], 1),
        ("Parisian", "Paris", 0),
        ("in Paris | in Lyon", "Paris", 0),
        ("", "Paris", 0),
        (" ".join(["Lyon"] * 30 + ["Paris"]), "Paris", 0),
        ("anything", "the", 0),
        ("The The", "The The", 1),
        ("The", "The The", 0),
    ],
)
async def test_substring(answer: str, gold: object, score: int) -> None:
    assert (await Substring().judge(answered("mhqa", "nq", answer, gold))).score == score


class Array:
    """The value of a list column from a parquet reader."""

    def tolist(self) -> list[str]:
        return ["a", "b"]


@pytest.mark.parametrize(
    ("ground_truth", "expected"),
    [
        ("204", ("204",)),
        (204, ("204",)),
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
def test_gold_answers_in_every_layout_of_published_rows(ground_truth: Any, expected: tuple[str, ...]) -> None:
    assert gold_answers(ground_truth) == expected


@pytest.mark.parametrize("ground_truth", [None, "", "  ", [], {"target": []}, {"answer": "a"}, True])
def test_a_row_without_an_answer_is_an_error(ground_truth: Any) -> None:
    with pytest.raises(DataError, match="holds no answer; expected"):
        gold_answers(ground_truth)
