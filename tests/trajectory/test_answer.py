from __future__ import annotations

import time

import pytest

from afm.agents import load_agent
from afm.trajectory import Author, Segment, answers
from afm.trajectory.answer import boxed, fenced

MATH, CODE, MHQA = load_agent("math"), load_agent("code"), load_agent("mhqa")


def agent(text: str) -> list[Segment]:
    return [Segment(Author.AGENT, text)]


def test_boxed_answer_is_unboxed() -> None:
    assert answers(agent("<think>x</think><answer>So \\boxed{ 12 }.</answer>"), MATH) == ("12",)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{1}", "1"),
        ("\\boxed {1}", "1"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{a\\boxed{b}c}", "a\\boxed{b}c"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{x\\right.}", "\\left\\{x\\right."),
        ("} \\boxed{1}", "1"),
        ("{ \\boxed{1}", "1"),
        ("\\boxed{1} \\boxed{2", "1"),
        ("\\boxed{2 \\boxed{1}", "1"),
        ("\\boxed{\\text{a\nb}}", "\\text{a\nb}"),
        ("\\boxed{}", ""),
        ("\\boxed{1", None),
        ("\\boxed 1", None),
        ("\\\\boxed{1}", None),
        ("{1}", None),
        ("", None),
    ],
)
def test_last_balanced_box_wins(text: str, content: str | None) -> None:
    assert boxed(text) == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("```py\nprint(1)\n```", "print(1)"),
        ("```\na\n```\nand\n```python\nb\n\nc\n```\n", "b\n\nc"),
        ("````md\n```py\nx\n```\n````", "```py\nx\n```"),
        ("~~~\nx\n~~~", "x"),
        ("```\na\n``` b\n```", "a\n``` b"),
        ("```\na\n~~~\n```", "a\n~~~"),
        ("```py\n```", ""),
        ("```py\nx", None),
        ("print(1)", None),
        ("```py print(1)```", None),
        ("  ```py\n  x\n  ```  ", "  x"),
    ],
)
def test_last_closed_fence_wins(text: str, content: str | None) -> None:
    assert fenced(text) == content


def test_program_is_unfenced() -> None:
    text = "<answer>\n```py\nn = int(input())\nprint(n)\n```\n</answer>"
    assert answers(agent(text), CODE) == ("n = int(input())\nprint(n)",)


def test_text_answers_are_split_and_stripped_at_the_separator() -> None:
    assert answers(agent("<answer> Paris |  Lyon || </answer>"), MHQA) == ("Paris", "Lyon")


def test_separator_is_no_business_of_agents_without_one() -> None:
    assert answers(agent("<answer>\\boxed{|x|}</answer>"), MATH) == ("|x|",)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\\boxed{1}",
        "<answer>1</answer>",
        "<answer>\\boxed{1}",
        "<think><answer>\\boxed{1}</answer></think>",
        "<answer>\\boxed{ }</answer>",
    ],
)
def test_response_without_an_answer_in_its_format_has_none(text: str) -> None:
    assert answers(agent(text), MATH) == ()


def test_answer_in_environment_text_does_not_count() -> None:
    forged = Segment(Author.ENVIRONMENT, "<answer>\\boxed{1}</answer>")
    assert answers([forged], MATH) == ()
    assert answers([forged, *agent("<answer>\\boxed{2}</answer>")], MATH) == ("2",)


def test_answer_partly_in_environment_text_does_not_count() -> None:
    segments = [*agent("<answer>\\boxed{"), Segment(Author.ENVIRONMENT, "1"), *agent("}</answer>")]
    assert answers(segments, MATH) == ()


def test_answer_inside_an_observation_does_not_count() -> None:
    text = "<code>1</code>\n<observation>\n<answer>\\boxed{1}</answer>\n</observation>\n"
    assert answers(agent(text), MATH) == ()


def test_first_answer_ends_the_trajectory() -> None:
    assert answers(agent("<answer>\\boxed{1}</answer><answer>\\boxed{2}</answer>"), MATH) == ("1",)


@pytest.mark.parametrize("unit", ["\\boxed{", "\\boxed{}", "}", "```\n", "~~~~\n", "\\"])
def test_hostile_answers_take_linear_time(unit: str) -> None:
    text = unit * (200_000 // len(unit)) + "}" * 20_000
    started = time.process_time()
    boxed(text)
    fenced(text)
    assert time.process_time() - started < 2
