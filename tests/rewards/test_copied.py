"""Answers that were copied out of the question."""

from __future__ import annotations

import pytest

from afm.rewards.equality import is_copied

COPIED = [
    (r"11\sqrt{2}", r"\sqrt{242}", r"Simplify $\sqrt{242}$."),
    ("(a+5)(b+2)", "ab+5b+2a+10", r"Factor $ab + 5b + 2a + 10$."),
    (r"\frac{3}{20}", "0.15", "Express 0.15 as a common fraction."),
    ("0.15", r"\frac{3}{20}", r"What is $\frac{3}{20}$ as a decimal?"),
    (r"-\frac{\pi}{6}", r"\arcsin(-\frac{1}{2})", r"Compute $\arcsin \left( -\frac{1}{2} \right).$"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{3}{\sqrt{27}}", r"Rationalize: $\dfrac{3}{\sqrt{27}}$"),
    (r"x^2-1", r"\boxed{(x-1)(x+1)}", "Expand $(x-1)(x+1)$."),
]
HONEST = [
    (
        r"11\sqrt{2}",
        r"\sqrt{242}",
        r"Which is larger, $11\sqrt{2}$ or $\sqrt{242}$?",
    ),  # so does the gold answer
    (r"60^\circ", "60", r"One angle has $60^\circ$, the other?"),  # the gold answer stands there itself
    (r"60^\circ", "60", "A figure of 60 degrees"),  # another way to write it
    ("1{,}000", "1000", "There are 1000 trees."),
    (r"\frac{1}{2}", "1/2", "A coin falls on heads in 1/2 of the cases."),
    (r"\frac{3}{20}", "0.15", "A thing of weight 10.15, another of 0.151 and 0.15.2"),  # a part of a number
    (r"11\sqrt{2}", r"\sqrt{242}", "What is the diagonal of a square with side 11?"),
    (r"\frac{1}{2}x", r"\frac{x}{2}", r"A line is parallel to $y = \frac{x}{2}$."),
    (r"2 \cdot x", "2x", "Let $2x = z$."),
]


@pytest.mark.parametrize(("gold", "answer", "question"), COPIED)
def test_a_formula_of_the_question_is_no_answer(gold: str, answer: str, question: str) -> None:
    assert is_copied(gold, answer, question)


@pytest.mark.parametrize(("gold", "answer", "question"), HONEST)
def test_an_answer_that_happens_to_stand_there_is_one(gold: str, answer: str, question: str) -> None:
    assert not is_copied(gold, answer, question)


@pytest.mark.parametrize("answer", ["", " ", "(" * 4000, r"\frac{1}{" * 999, "a " * 2000, "\\" * 4001])
def test_hostile_answers_are_looked_up_in_no_time(answer: str) -> None:
    assert not is_copied(r"\sqrt{2}", answer, "a " * 1999 + "b")
