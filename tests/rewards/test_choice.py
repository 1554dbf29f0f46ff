"""Multiple choice: which letter an answer names."""

from __future__ import annotations

import pytest
from answered import answered

from afm.rewards.text_match import ChoiceLetter, choice_letter


@pytest.mark.parametrize(
    "text",
    [
        "C",
        "(c)",
        r"\boxed{\text{C}}",
        "**(C)** 5 m/s",
        "The correct answer is (C).",
        "C. Vitamin C",
        "C. So the answer is C",
        "C. F = ma",
        "C) as (A) and (B) contradict the text",
        "Option C is correct because A and B are wrong",
        "The answer is C, not D",
        "\uff23",
        "C \u2014 Paris",
        "__C__",
        '"C"',
        r"\textbf{(C)}\ 42",
        "I choose C",
        "C (not D)",
        "C. The others (A, B, D) are wrong",
    ],
)
def test_one_option(text: str) -> None:
    assert choice_letter(text) == "C"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "(C) (D)",
        "CD",
        "I think C",
        "C. D",
        "C. Actually the answer is D",
        "C, since D is right too, so D",
        "C. On second thought, the last one",
        "C. (d)",
        "C. Vitamin D",
        "C. Wait, C is wrong",
        "C isn't correct",
        "C is correct. So is D.",
        "It is C, or D",
        "C. A, B and C are wrong",
        "C" * 5000,
        r"\boxed{" * 1000 + "C",
        "(" * 5000,
    ],
)
def test_none_or_several(text: str) -> None:
    assert choice_letter(text) is None


def test_the_text_of_the_option_is_no_second_letter() -> None:
    question = "What is missing? (A) iron (B) zinc\n(C) Vitamin D (D) Both B and C"
    assert choice_letter("C. Vitamin D", question) == "C"
    assert choice_letter("(D) Both B and C.", question) == "D"
    assert choice_letter("C. Both B and C", question) is None
    assert choice_letter("C. D", question) is None


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [("B", "B", 1), ("(b) 7", "B", 1), ("A", "B", 0), ("A | B", "B", 0), ("B | B", "(B)", 1), ("", "B", 0)],
)
async def test_verdicts(answer: str, gold: str, score: int) -> None:
    assert (await ChoiceLetter().judge(answered("mhqa", "gpqa", answer, gold))).score == score


@pytest.mark.parametrize("gold", ["", "seven", ["A", "B"], None])
async def test_a_row_without_a_letter_has_no_score(gold: object) -> None:
    assert (await ChoiceLetter().judge(answered("mhqa", "gpqa", "A", gold))).score is None
