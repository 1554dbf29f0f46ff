"""Equality of mathematical answers that needs no algebra, and the limits of it."""

from __future__ import annotations

import pytest

from afm.rewards.equality import algebra_verdict, quick_verdict

EQUAL = [
    ("204", "204"),
    ("204", " 204 "),
    ("27.0", "27"),
    ("27", "27."),
    ("0.5", ".50"),
    ("24", "024"),
    ("-3", "-3.0"),
    ("3", "+3"),
    ("204", "$204$"),
    (r"\frac{1}{2}", r"\dfrac{1}{2}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"( 3, \frac{\pi}{2} )"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{Evelyn}", r"\textbf{evelyn}"),
    (r"\text{(C)}", "C"),
    (r"\text{east}", "East."),
    ("52_8", "52_{8}"),
    ("52_8", "52"),
    ("x" * 9000, "x" * 9000),
]
DIFFERENT = [
    ("204", "205"),
    ("204", ""),
    ("204", "$ $"),
    ("204", "20.4"),
    ("1", "1" * 5000),
    (r"\text{Evelyn}", "nylevE"),
    (r"\text{even}", r"\text{never}"),
    (r"\text{(C)}", "B"),
    ("52_8", "52_9"),
    ("52_8", "53"),
]
UNDECIDED = [
    ("0.5", r"\frac12"),
    ("10080", "10,080"),
    ("3.14159265", "3.14159266"),
    ("2", "1+1"),
    ("x", "y"),
    (r"90^\circ", "90"),
    (r"\pi", "3.14159"),
    ("5", "x=5"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal_without_algebra(gold: str, answer: str) -> None:
    assert quick_verdict(gold, answer) is True


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_different_without_algebra(gold: str, answer: str) -> None:
    assert quick_verdict(gold, answer) is False


@pytest.mark.parametrize(("gold", "answer"), UNDECIDED)
def test_left_to_algebra(gold: str, answer: str) -> None:
    assert quick_verdict(gold, answer) is None


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("0.5", r"\frac12", True),
        ("10080", "10,080", True),
        ("2", "1+1", True),
        ("p - q", "-q+p", True),
        (r"90^\circ", "90", True),
        ("1,-2", "-2,1", True),
        ("y = 2x + 3", "2x+3", True),
        (r"1 \pm \sqrt{19}", r"1+\sqrt{19},1-\sqrt{19}", True),
        ("6", "6,7", False),
        ("6", r"6 \text{ or } 7", False),
        ("6", r"\boxed{7}, \boxed{6}", False),
        (r"\frac{1}{3}", "0.3", False),
        ("x", "y", False),
        (r"\pi", "(" * 50, False),
        ("6", "__import__('os').system('true')", False),
    ],
)
def test_algebra(gold: str, answer: str, equal: bool) -> None:
    assert algebra_verdict(gold, answer) is equal
