"""Token F1 and substring match."""

from __future__ import annotations

import pytest
from answered import answered

from afm.rewards.text_match import MatchVariant, Substring, TokenF1, token_f1


@pytest.mark.parametrize(
    ("answer", "gold", "expected"),
    [
        ("the Beatles", "Beatles", 1.0),
        ("George Washington Carver", "George Washington", 0.8),  # precision 2/3, recall 1
        ("no no no", "no", 0.5),  # precision 1/3, recall 1
        ("Paris", "London", 0.0),
        ("...", "the", 0.0),
        ("the the", "The The", 1.0),
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
    ],
)
async def test_substring(answer: str, gold: object, score: int) -> None:
    assert (await Substring().judge(answered("mhqa", "nq", answer, gold))).score == score
