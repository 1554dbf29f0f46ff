"""Exact match: normalisation, and which of several answers count."""

from __future__ import annotations

import pytest
from answered import answered

from afm.rewards.text_match import ExactMatch, MatchVariant, normalised


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Beatles!", "beatles"),
        ("an apple a day", "apple day"),
        ("U.S.A.", "usa"),
        ("Theatre", "theatre"),
        ("  \n", ""),
        ("Café—Zürich", "café—zürich"),
        ("the", ""),
    ],
)
def test_normalisation(text: str, expected: str) -> None:
    assert normalised(text) == expected


@pytest.mark.parametrize(
    ("answer", "gold", "training", "evaluation"),
    [
        ("Paris", ["paris"], 1, 1),
        ("the Paris.", "Paris", 1, 1),
        ("Paris | Lyon", ["Paris"], 0, 1),
        ("Paris | Lyon", ["Lyon", "Paris"], 1, 1),
        ("Lyon | Paris", ["Paris"], 0, 0),
        ("Paris", {"target": ["London"]}, 0, 0),
        ("Parisian", ["Paris"], 0, 0),
        ("...", ["the"], 0, 0),
        ("the  THE", "The The", 1, 1),  # nothing is left of it: compared as it stands
        ("A", ["A"], 1, 1),
        ("?", "?", 1, 1),
        ("an", ["A"], 0, 0),
        ("the", ["The The"], 0, 0),
        ("...", ["?", "Paris"], 0, 0),
        ("", ["Paris"], 0, 0),
    ],
)
async def test_variants(answer: str, gold: object, training: int, evaluation: int) -> None:
    given = answered("mhqa", "nq", answer, gold)
    assert (await ExactMatch(MatchVariant.TRAINING).judge(given)).score == training
    assert (await ExactMatch(MatchVariant.EVALUATION).judge(given)).score == evaluation


async def test_a_row_without_gold_answer_has_no_score() -> None:
    part = await ExactMatch().judge(answered("mhqa", "nq", "Paris", []))
    assert part.score is None
    assert "holds no answer" in part.evidence
