"""Multiple choice: which letter an answer names."""

from __future__ import annotations

import pytest

from afm.agents import load_agent
from afm.rewards import Sample
from afm.rewards.choice import ChoiceLetter, choice_letter
from afm.trajectory import author_segments

SPEC = load_agent("mhqa")


@pytest.mark.parametrize(
    "text",
    [
        "C",
        "(c)",
        "C.",
        "[C]",
        r"\boxed{C}",
        r"\boxed{\text{C}}",
        "**C**",
        "**(C)** 5 m/s",
        "Answer: C",
        "option c",
        "The correct answer is (C).",
        "C) because B is wrong",
        "C. Vitamin C",
        "C: 5 m/s",
        "$C$",
        "C. because A and B are wrong",
        "C, since A, B and D are not prime",
        "C) as (A) and (B) contradict the text",
        "C. Vitamin C and calcium",
        "C. Either way, or rather never",
        "C. But the reaction is slow",
        "C. A dog or a cat",
        " C\n",
        "C is correct",
        "(C) is the right answer.",
        "Option C is correct because A and B are wrong",
        "C is correct. D is wrong.",
        "C. This is correct, A isn't right.",
        "The answer is C, not D",
        "C, rather than D",
        "C. So the answer is C",
        "C. 5 J",
        "C. F = ma",
        "\uff23",
        *(
            "C - 42",
            "C \u2014 Paris",
            "C (Paris)",
            "*C*",
            "__C__",
            '"C"',
            "{C}",
            r"\(C\)",
            r"\textbf{(C)}\ 42",
        ),
        *(
            "The answer is option C",
            "Therefore, the answer is C.",
            "So (C)",
            "It's C",
            "I choose C",
            "the letter C",
        ),
        *(
            "C. Options A, B and D are wrong",
            "C (not D)",
            "C. Not A, B or D",
            "C. The others (A, B, D) are wrong",
        ),
    ],
)
def test_one_option(text: str) -> None:
    assert choice_letter(text) == "C"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "C or D",
        "C, D",
        "C and D",
        "(C) (D)",
        "A. B. C.",
        "C) x D) y",
        "C cat",
        "CD",
        "I think C",
        "5",
        "C, D, A",
        "C. D",
        "C. Or D",
        "C) or maybe D",
        "C. Also D",
        "C. Actually the answer is D",
        "C, but perhaps (D)",
        "C. But D.",
        "C because the answer is D",
        "C. Because the correct option is (D)",
        "C, since D is right too, so D",
        "C - no, D",
        "C = D",
        "C. The other plausible option is D",
        "C. choose D instead",
        "C then D",
        "C. On second thought: D",
        "C. On second thought, the last one",
        "C, or the last one",
        "C. Scratch that.",
        "C. No: d",
        "C. (d)",
        "C. Vitamin D",
        "C, which is wrong",
        "C. Wait, C is wrong",
        "C is not correct",
        "C isn't correct",
        "C is wrong",
        "C is correct?",
        "C is correct. So is D.",
        "C is correct, or D",
        "not C",
        "The answer is not C",
        *(
            "C - D",
            "C (D)",
            "C (or D)",
            "Thus C or D",
            "It is C, or D",
            "C. A, B and C are wrong",
            "C. Not B or C",
        ),
        *("It is a cat", "So A cat", "I choose neither C nor D"),
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


def sample(answer: str, gold: object) -> Sample:
    response = f"<think>t</think><plan>p</plan><think>t</think><answer>{answer}</answer>"
    return Sample(SPEC, "gpqa_diamond", "q", author_segments(response, SPEC), gold)


@pytest.mark.parametrize(
    ("answer", "gold", "score"),
    [("B", "B", 1), ("(b) 7", "B", 1), ("A", "B", 0), ("A | B", "B", 0), ("B | B", "(B)", 1), ("", "B", 0)],
)
async def test_verdicts(answer: str, gold: str, score: int) -> None:
    assert (await ChoiceLetter().judge(sample(answer, gold))).score == score


@pytest.mark.parametrize("gold", ["", "seven", ["A", "B"], None])
async def test_a_row_without_a_letter_has_no_score(gold: object) -> None:
    assert (await ChoiceLetter().judge(sample("A", gold))).score is None
