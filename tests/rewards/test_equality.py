"""Equality of mathematical answers that needs no algebra, and the limits of it."""

from __future__ import annotations

import time

import pytest

from afm.rewards.answer_form import form_of
from afm.rewards.equality import is_copied, is_unevaluated, quick_verdict, readings
from afm.rewards.verifier import algebra_verdict

EQUAL = [
    ("3", "+3"),
    (r"\frac{1}{2}", r"\dfrac{1}{2}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"( 3, \frac{\pi}{2} )"),
    (r"\text{east}", "East."),
    (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{\sqrt{2}}{2}}"),
    ("10080", "\\$10,080.00"),
    ("32349", r"32,\! 349"),
    ("25", r"\text{025}"),
    (r"\text{e}", "e"),
    (r"-0.1\bar6", r"-0.1\overline{6}"),
    ("52_8", r"52_{\text{eight}}"),
    ("52_8", "52 base 8"),
    ("72", "72 cm²"),
    ("-2", "\u20132"),
    (r"90^{\circ}", r"(90)\degree"),
    ("72", r"\text{Total} = 72\text{ km}"),
    (r"11\sqrt{2}", "11√2"),
    (r"1.5 \times 10^{-7}", "1.5e-7"),
    ("(-7, 1)", r"\langle -7, 1\rangle"),
    ("x" * 9000, "x" * 9000),
]
DIFFERENT = [
    ("204", "$ $"),
    ("204", "20.4"),
    (r"\text{(C)}", "B"),
    ("god", "dog"),
    ("x-ray", "ray-x"),
    ("52_8", "52 base 9"),
    (r"0.\overline{3}", r"0.\overline{4}"),
    (r"15\mbox{ cm}^2", "16 cm^2"),
    (r"-2 \text{ and } 1", r"-2 \le x \le 1"),
    ("-2 < x < 1", "-2, 1"),
]
UNDECIDED = [
    ("0.5", r"\frac12"),
    ("3.14159265", "3.14159266"),
    (r"90^\circ", "90"),
    ("5", "2x=5"),
    ("x-y", "-y+x"),
    ("bcd", "cdb"),
    ("6", r"\boxed{7}, \boxed{6}"),
    ("3 R^2", "3"),
    ("72", "72 or 73"),
    ("(-2,1)", "-2 < x < 1"),
]


QUICK = [
    (*pair, verdict)
    for verdict, pairs in ((True, EQUAL), (False, DIFFERENT), (None, UNDECIDED))
    for pair in pairs
]


@pytest.mark.parametrize(("gold", "answer", "verdict"), QUICK)
def test_what_is_equal_or_different_without_algebra_and_what_is_left_to_it(
    gold: str, answer: str, verdict: bool | None
) -> None:
    assert quick_verdict(gold, answer) is verdict


WHAT_PERCENT = "By what percent does a price fall that first rises by 10%?"
NO_PERCENT = "What is the probability?"
OTHER_PERCENT = "Of 30 apples, 10% are eaten. How many apples are eaten?"


@pytest.mark.parametrize(
    ("gold", "answer", "question", "pairs"),
    [
        (r"20\%", "20 percent", WHAT_PERCENT, [("20", "20")]),
        (r"20\%", r"20\text{ percent}", "", [("20", "20")]),
        (r"20\%", "0.2", WHAT_PERCENT, [("20", "0.2")]),
        (r"20\%", "0.2", NO_PERCENT, [("20", "0.2"), ("0.2", "0.2")]),
        ("20", r"20 \%", WHAT_PERCENT, [("20", "20")]),
        ("20", r"20\%", "", [("20", "20"), ("20", "0.2")]),
        ("3", r"3\%", OTHER_PERCENT, [("3", "3"), ("3", "0.03")]),
        ("0.2", r"-20\%", NO_PERCENT, [("0.2", "-0.2")]),
        ("0.2", r"20.0\%", "Write $20\\%$ as a decimal.", [("0.2", "20.0")]),  # copied
        (r"\frac{1}{3}", r"\frac{100}{3}\%", WHAT_PERCENT, [(r"\frac{1}{3}", r"\frac{100}{3}")]),
        ("x=4, y=5", "(4,5)", "", [("(4, 5)", "(4,5)")]),
        (r"y=5 \text{ and } x=4", "5, 4", "", [("(5, 4)", "(5, 4)")]),
        (r"x_1=\frac12,\ x_2=(3)", "y", "", [(r"(\frac12, (3))", "y")]),
        ("(4,5)", "y=5, x=4", "", [("(4,5)", "(4, 5)")]),
        ("x=4, y=5", "y=5, x=4", "", [("x=4, y=5", "y=5, x=4")]),
        ("x=1, x=2", "1,2", "", [("x=1, x=2", "1,2")]),
        ("x=(1,2), y=3", "3", "", [("x=(1,2), y=3", "3")]),
        (r"\begin{pmatrix} -7 \\ \frac12 \end{pmatrix}", "(-7, 0.5)", "", [(r"(-7, \frac12)", "(-7, 0.5)")]),
        ("(1,2)", r"\begin{bmatrix}1\\2\end{bmatrix}", "", [("(1,2)", "(1, 2)")]),
        (r"\begin{pmatrix}1&2\end{pmatrix}", "(1,2)", "", [(r"\begin{pmatrix}1&2\end{pmatrix}", "(1,2)")]),
        (r"\infty", r"x < 2 \text{ or } x \ge 3", "", [(r"\infty", r"(-\infty, 2) \cup [3, \infty)")]),
        (r"(-\infty,2)", r"x < 2 \text{ or } y > 3", "", [(r"(-\infty,2)", r"x < 2 \text{ or } y > 3")]),
        (r"(-\infty,2)", "x < 2", "", [(r"(-\infty,2)", "x < 2")]),  # algebra reads it as it is
    ],
)
def test_percent_signs_and_named_unknowns(
    gold: str, answer: str, question: str, pairs: list[tuple[str, str]]
) -> None:
    assert readings(gold, answer, question) == pairs


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", False),
        (r"\frac{1}{2^{99}}", r"\frac{2}{2^{100}}", True),
        (r"\frac{x}{2^{99}}", r"\frac{x}{2^{98}}", False),
        (r"(1, \frac{1}{2^{99}})", r"(1, \frac{1}{2^{98}})", False),
        (r"3 \cdot 10^{-7}", "0.0000003", True),
        ("10^{200}+1", "10^{200}", False),
        ("100!", "100!+1", False),
        (r"\begin{pmatrix} 1 & 2^{-99} \end{pmatrix}", r"\begin{pmatrix} 1 & 2^{-98} \end{pmatrix}", False),
        (r"\frac{\pi}{4}", r"\int_0^1 \frac{1}{1+t^2} dt", False),
        (r"\frac{\pi}{4}", r"\int_0^1 \frac{1}{1+t^2} dt = \frac{\pi}{4}", True),
        (r"\frac{\pi}{4}", r"3 = \int_0^1 \frac{1}{1+t^2} dt", False),
        (r"\int_0^1 x^2 dx", r"\int_0^1 t^2 dt", True),
        (r"\sum_{k=1}^n k", r"\frac{n(n+1)}{2}", True),
        (r"\frac{n(n+1)}{2}", r"\sum_{k=1}^n k", False),
        ("2x+4y-3=0", "4y=3+2x", False),
        (r"\frac16", r"0.1\overline{6}", True),
        (r"x \in [-2,7]", r"-2 \le x \le 7", True),
        ("2", "1+1", True),
        ("6-5i", r"6 - 5\mathrm{i}", True),
        ("6-5i", r"6 + 5\mathrm{i}", False),
        ("x-y", "y-x", False),
        (r"90^\circ", "90", True),
        (r"1 \pm \sqrt{19}", r"1+\sqrt{19},1-\sqrt{19}", True),
        ("6", r"6 \text{ or } 7", False),
        ("6", r"\boxed{7}, \boxed{6}", False),
        (r"\frac{1}{3}", "0.3", False),
        (r"\pi", "(" * 50, False),
        ("6", "__import__('os').system('true')", False),
    ],
)
def test_algebra(gold: str, answer: str, equal: bool) -> None:
    assert algebra_verdict(gold, answer) is equal


@pytest.mark.parametrize(
    "answer",
    [
        r"6 \cdot 12",
        "71=72",
        "2^{3}",
        "80−8",
        "80$-$8",
        r"\operatorname{lcm}(8,9)",
        "72_{9}",
        "72,73",
        r"72\text{ is wrong}",
        r"\frac{1}{2}\text{ dozen}",
        r"72\mathrm{i}",
        r"72\text{k}",
        r"\text{about }72",
        r"x \neq 72",
        "2x=72",
        r"12 \cdot 6 \approx 72",
        "72.5.1",
        "",
    ],
)
def test_an_expression_that_was_not_worked_out_is_no_number(answer: str) -> None:
    assert is_unevaluated("72", answer)


@pytest.mark.parametrize(
    "answer",
    [
        "x = -72",
        "72^{\\circ}",
        r"7.2 \times 10^{1}",
        "£72.50",
        r"72\ \mathrm{m/s^2}",
        "−72",
        "７２",
        "(72)",
        r"\approx 72",
        r"1\,072",
        "72_{10}",
        r"72\text{ miles per hour}",
        r"\mathrm{x} = 72\text{ years}",
        "60+12 = 72",
        r"\angle ABC = 72^\circ",
        r"x = \frac{1}{3} \approx 0.33",
        r"1\frac{1}{2}",
        r"0.\overline{3}",
    ],
)
def test_a_number_in_other_clothes_is_a_value(answer: str) -> None:
    assert not is_unevaluated("72", answer)


@pytest.mark.parametrize(
    ("gold", "answer", "unevaluated"),
    [
        (r"2\sqrt{3}", r"\sqrt{12}", False),
        ("2x+4y-3=0", "4y=3-2x", False),
        ("x=4, y=5", "(4,5)", False),
        ("|AB| = 72", "60+12", True),
        (r"\frac{5}{6}", r"\frac{10}{12}", False),
        (r"\frac{5}{6}", r"\frac{-5}{-6}", False),
        (r"-\frac{5}{6}", "5/-6", False),
        ("2", r"\frac{-4}{-2}", True),
        (r"\frac{5}{6}", r"\frac{1}{2}+\frac{1}{3}", True),
        ("10\\%", "5\\%+5\\%", True),
        ("72 km/h", "144/2", True),
        ("72", "72/1", True),
    ],
)
def test_plain_gold_numbers_ask_for_a_value_and_fractions_for_a_fraction(
    gold: str, answer: str, unevaluated: bool
) -> None:
    assert is_unevaluated(gold, answer) is unevaluated


PIECES = (
    "\\ ",
    "1,",
    "a=",
    "{",
    "111 ",
    "and ",
    "x<1 or ",
    "\\text{1 a",
    "a/",
    "((",
    "^{2}",
    "\\cdot a",
    "\\frac{1}",
)


@pytest.mark.parametrize("piece", PIECES)
def test_long_answers_are_read_in_no_time(piece: str) -> None:
    answer = piece * (3900 // len(piece)) + "!"
    begun = time.perf_counter()
    readings(r"20\%", answer, "What is it?")
    quick_verdict("72", answer)
    form_of(piece * (400 // len(piece)))
    form_of("1 " + piece * (390 // len(piece)) + "!")
    assert time.perf_counter() - begun < 0.8


COPIED = [
    (r"11\sqrt{2}", r"\sqrt{242}", r"Simplify $\sqrt{242}$."),
    ("0.15", r"\frac{3}{20}", r"What is $\frac{3}{20}$ as a decimal?"),
    (r"x^2-1", r"\boxed{(x-1)(x+1)}", "Expand $(x-1)(x+1)$."),
]
HONEST = [
    (r"11\sqrt{2}", r"\sqrt{242}", r"Is $11\sqrt{2}$ larger or $\sqrt{242}$?"),  # so does the gold answer
    (r"60^\circ", "60", r"One angle has $60^\circ$, the other?"),  # the gold answer stands there itself
    (r"60^\circ", "60", "A figure of 60 degrees"),  # another way to write it
    ("1{,}000", "1000", "There are 1000 trees."),
    (r"\frac{1}{2}", "1/2", "A coin falls on heads in 1/2 of the cases."),
    (r"\frac{3}{20}", "0.15", "A thing of weight 10.15, another of 0.151 and 0.15.2"),  # a part of a number
    (r"11\sqrt{2}", r"\sqrt{242}", "What is the diagonal of a square with side 11?"),
    (r"\frac{1}{2}x", r"\frac{x}{2}", r"A line is parallel to $y = \frac{x}{2}$."),
]


@pytest.mark.parametrize("row", COPIED + HONEST)
def test_a_formula_of_the_question_is_no_answer_unless_it_is_the_gold_one(row: tuple[str, str, str]) -> None:
    assert is_copied(*row) is (row in COPIED)


@pytest.mark.parametrize("answer", ["", " ", "(" * 4000, r"\frac{1}{" * 999, "a " * 2000, "\\" * 4001])
def test_hostile_answers_are_looked_up_in_no_time(answer: str) -> None:
    assert not is_copied(r"\sqrt{2}", answer, "a " * 1999 + "b")


def test_the_time_for_blanks_grows_with_their_number() -> None:
    def seconds(count: int) -> float:
        begun = time.process_time()
        quick_verdict("1{,}" + " " * count + "x", "12")
        quick_verdict("12", "1{,}" + " " * count + "x")
        return time.process_time() - begun

    assert seconds(40_000) < 0.5  # 7 s when it grew with the square
