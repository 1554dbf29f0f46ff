"""Equality of mathematical answers that needs no algebra, and the limits of it."""

from __future__ import annotations

import time

import pytest

from afm.rewards.answer_form import form_of
from afm.rewards.equality import is_unevaluated, quick_verdict, readings
from afm.rewards.verifier import algebra_verdict

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
    ("72", r"\boxed{72}"),
    (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{\sqrt{2}}{2}}"),
    ("10080", "10,080"),
    ("10080", "\\$10,080.00"),
    ("32349", r"32,\! 349"),
    ("14{,}916", "14916"),
    ("1234567", "1 234 567"),
    ("25", r"\text{025}"),
    (r"\text{025}", "25"),
    (r"\text{e}", "e"),
    (r"\frac{1}{3}", r"\cfrac{1}{3}"),
    (r"0.\overline{3}", r"0.3\overline{33}"),
    (r"-0.1\bar6", r"-0.1\overline{6}"),
    ("52_8", "52_{8}"),
    ("52_8", "52"),
    *(("52_8", r"52_{\text{eight}}"), ("52_8", r"52 \text{ (base 8)}"), ("52_8", "52 base 8")),
    *(
        ("72", "72 people"),
        ("72", r"\text{72 apples}"),
        ("72", "72 km/h"),
        ("72", "72 cm²"),
        ("72", "72 m^3"),
    ),
    *((r"15\mbox{ cm}^2", "15 cm^2"), (r"5.4\text{ cents}", "5.40 cents")),
    *(
        ("-2", "\u20132"),
        ("58500", r"58\ 500"),
        (r"90^{\circ}", r"(90)\degree"),
        (r"\emptyset", r"\varnothing"),
    ),
    *(("6250", "x = 6,250"), ("5", "x=5"), ("72", r"\text{Total} = 72\text{ km}")),
    *((r"1\frac{4}{5}", "1 4/5"), (r"1\frac{4}{5}", r"1\ \frac{4}{5}"), (r"11\sqrt{2}", "11√2")),
    *((r"1.5 \times 10^{-7}", "1.5e-7"), ("(-7, 1)", r"\langle -7, 1\rangle")),
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
    *(("no", "on"), ("god", "dog"), ("act", "cat"), ("AB", "BA"), ("x-ray", "ray-x"), (r"\text{ab}", "ba")),
    ("52_8", "52_9"),
    ("52_8", "53"),
    ("32349", r"32,\! 449"),
    (r"0.\overline{3}", r"0.\overline{4}"),
    ("25", r"\text{052}"),
    *(("52_8", r"52_{\text{nine}}"), ("52_8", "52 base 9"), ("52_8", r"53_{\text{eight}}")),
    ("6250", "x = 6,350"),
    *(("72", "73 people"), ("72", "-72 dollars"), (r"15\mbox{ cm}^2", "16 cm^2")),
    *(("-2,1", "-2 < x < 1"), (r"-2 \text{ and } 1", r"-2 \le x \le 1"), ("-2 < x < 1", "-2, 1")),
]
UNDECIDED = [
    ("0.5", r"\frac12"),
    ("3.14159265", "3.14159266"),
    ("2", "1+1"),
    ("x", "y"),
    (r"90^\circ", "90"),
    (r"\pi", "3.14159"),
    *(("x=5", "5"), ("5", "y=6, x=5"), ("5", "x=6, y=5"), ("5", "2x=5"), ("x_{1}=5", "x_{2}=5")),
    *(("xy", "yx"), ("ab", "a b"), ("x-y", "-y+x"), ("p - q", "-q + p"), ("ab-c", "-c+ba"), ("bcd", "cdb")),
    ("6", r"\boxed{7}, \boxed{6}"),
    *(
        ("2", "2k"),
        ("2", "2 k"),
        ("2k", "2"),
        ("3 R^2", "3"),
        ("72", "72 million"),
        ("72", "72 or 73"),
        ("72", "72 pi"),
    ),
    *(("(-2,1)", "-2 < x < 1"), ("-2 < x < 1", "(-2,1)")),
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


WHAT_PERCENT = "By what percent does a price fall that first rises by 10%?"
NO_PERCENT = "What is the probability?"
OTHER_PERCENT = "Of 30 apples, 10% are eaten. How many apples are eaten?"


@pytest.mark.parametrize(
    ("gold", "answer", "question", "pairs"),
    [
        (r"20\%", "20 percent", WHAT_PERCENT, [("20", "20")]),
        (r"20\%", r"20\text{ percent}", "", [("20", "20")]),
        (r"20\%", "20 percentage points", "", [("20", "20")]),
        (r"20\%", "0.2", WHAT_PERCENT, [("20", "0.2")]),
        (r"20\%", "0.2", NO_PERCENT, [("20", "0.2"), ("0.2", "0.2")]),
        (r"12.5\%", "0.125", NO_PERCENT, [("12.5", "0.125"), ("0.125", "0.125")]),
        ("20", r"20 \%", WHAT_PERCENT, [("20", "20")]),
        ("20", r"20\%", "", [("20", "20"), ("20", "0.2")]),
        ("20", r"20\%", NO_PERCENT, [("20", "0.2")]),
        ("3", r"3\%", OTHER_PERCENT, [("3", "3"), ("3", "0.03")]),
        ("0.2", r"-20\%", NO_PERCENT, [("0.2", "-0.2")]),
        ("0.2", r"20.0\%", "Write $20\\%$ as a decimal.", [("0.2", "20.0")]),  # copied
        (r"\frac{1}{3}", r"\frac{100}{3}\%", WHAT_PERCENT, [(r"\frac{1}{3}", r"\frac{100}{3}")]),
        ("x=4, y=5", "(4,5)", "", [("(4, 5)", "(4,5)")]),
        (r"y=5 \text{ and } x=4", "5, 4", "", [("(5, 4)", "(5, 4)")]),
        (r"x_1=\frac12,\ x_2=(3)", "y", "", [(r"(\frac12, (3))", "y")]),
        ("(4,5)", "y=5, x=4", "", [("(4,5)", "(4, 5)")]),
        ("(2,3)", "m=2, b=3", "", [("(2,3)", "(2, 3)")]),
        ("x=4, y=5", "y=5, x=4", "", [("x=4, y=5", "y=5, x=4")]),
        ("x=1, x=2", "1,2", "", [("x=1, x=2", "1,2")]),
        ("x=(1,2), y=3", "3", "", [("x=(1,2), y=3", "3")]),
        (
            r"\begin{pmatrix} -7 \\ \frac12 \end{pmatrix}",
            "(-7, 0.5)",
            "",
            [(r"(-7, \frac12)", "(-7, 0.5)")],
        ),
        ("(1,2)", r"\begin{bmatrix}1\\2\end{bmatrix}", "", [("(1,2)", "(1, 2)")]),
        (r"\begin{pmatrix}1&2\end{pmatrix}", "(1,2)", "", [(r"\begin{pmatrix}1&2\end{pmatrix}", "(1,2)")]),
        (
            r"(-\infty,2) \cup [3,\infty)",
            r"x < 2 \text{ or } x \ge 3",
            "",
            [(r"(-\infty,2) \cup [3,\infty)", r"(-\infty, 2) \cup [3, \infty)")],
        ),
        (r"(-\infty,2)", r"x < 2 \text{ or } y > 3", "", [(r"(-\infty,2)", r"x < 2 \text{ or } y > 3")]),
    ],
)
def test_percent_signs_and_named_unknowns(
    gold: str, answer: str, question: str, pairs: list[tuple[str, str]]
) -> None:
    assert readings(gold, answer, question) == pairs


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        *(
            (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}", False),
            (r"\frac{1}{2^{99}}", r"\frac{2}{2^{100}}", True),
            (r"\frac{1}{2004!}", r"\frac{1}{2006!}", False),
            (r"\frac{\pi}{2^{99}}", r"\frac{\pi}{2^{98}}", False),
            (r"\frac{x}{2^{99}}", r"\frac{x}{2^{98}}", False),
            (r"(1, \frac{1}{2^{99}})", r"(1, \frac{1}{2^{98}})", False),
            (r"x < \frac{1}{2^{99}}", r"x < \frac{1}{2^{98}}", False),
            (r"3 \cdot 10^{-7}", "0.0000002", False),
            (r"3 \cdot 10^{-7}", "0.0000003", True),
            ("0", "0.0000001", False),
            ("10^{200}+1", "10^{200}", False),
            ("10^{200}+1", "1+10^{200}", True),
            ("100!", "100!+1", False),
            (r"\sqrt{8}", r"2\sqrt{2}", True),
            (
                r"\begin{pmatrix} 1 & 2^{-99} \end{pmatrix}",
                r"\begin{pmatrix} 1 & 2^{-98} \end{pmatrix}",
                False,
            ),
        ),
        *(
            (r"\frac{\pi}{4}", r"\int_0^1 \frac{1}{1+t^2} dt", False),
            (r"\frac{\pi}{4}", r"\int_0^1 \frac{1}{1+t^2} dt = \frac{\pi}{4}", True),
            (r"\frac{\pi}{4}", r"3 = \int_0^1 \frac{1}{1+t^2} dt", False),
            (r"\int_0^1 x^2 dx", r"\int_0^1 t^2 dt", True),
            (r"\sum_{k=1}^n k", r"\frac{n(n+1)}{2}", True),
            (r"\frac{n(n+1)}{2}", r"\sum_{k=1}^n k", False),
        ),
        *(
            ("2x+4y-3=0", "4y=3-2x", True),
            ("2x+4y-3=0", "4y=3+2x", False),
            (r"\frac16", r"0.1\overline{6}", True),
            (r"x \in [-2,7]", r"-2 \le x \le 7", True),
        ),
        ("0.5", r"\frac12", True),
        ("10080", "10,080", True),
        ("2", "1+1", True),
        *(
            ("6-5i", r"6 - 5\mathrm{i}", True),
            ("6-5i", r"6 - 5 \text{i}", True),
            ("6-5i", r"6 + 5\mathrm{i}", False),
        ),
        ("p - q", "-q+p", True),
        ("xy", "yx", True),
        ("xy", "x+y", False),
        ("ab", "a b", True),
        ("x-y", "y-x", False),
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


@pytest.mark.parametrize(
    "answer",
    [
        *(
            "60+12",
            r"6 \cdot 12",
            r"\sum_{i=1}^{72} 1",
            "71=72",
            "100-28",
            r"\frac{60+84}{2}",
            r"\sqrt{5184}",
        ),
        *("8!", "x=60+12", r"36\times 2", "36*2", r"\int_0^{72} 1 dx", "2^{3}", "(80)-8"),
        *("36×2", "36 · 2", "80−8", "144÷2", "80--8", "144/2", "144/4*2", "144:2", r"80\ -\ 8", "80$-$8"),
        *(
            r"{9 \choose 2}",
            r"144 \over 2",
            "(144)/(2)",
            r"\frac{144}{2}",
            r"\Gamma(5)",
            r"\lfloor 72.9\rfloor",
        ),
        *(
            r"\operatorname{lcm}(8,9)",
            "72_{9}",
            r"\lceil\pi\rceil",
            "3 6 x 2",
            "36 x 2",
            r"\frac{72}{1}",
            "72,73",
        ),
        *(
            *(
                rf"72\text{{ {word}}}"
                for word in ("million", "thousand", "dozen", "squared", "factorial", "Hundred")
            ),
            *(
                rf"72\text{{ {word}}}"
                for word in ("or less", "is wrong", "at most", "plus one", "not", "times two")
            ),
            *(
                r"72\mathrm{ million}",
                r"\frac{1}{2}\text{ dozen}",
                "72 million",
                r"72\,\text{thousand dollars}",
            ),
            *(
                r"72\mathrm{i}",
                r"72\mathbf{x}",
                r"72\mathit{x}",
                r"72\mathit{m}",
                r"72\text{k}",
                r"72\mathrm{e}",
            ),
            *(r"\text{not }72", r"\text{about }72", r"-\text{ }72\text{ below}"),
        ),
        *(r"x \neq 72", r"x \not= 72", "x < = 72", "2x=72", r"12 \cdot 6 \approx 72"),
        *(r"72 \pm 0", "72 or 73", r"\left|-72\right|", "72.5.1", "seventy-two", "a=b", "1=72", "", "=72"),
    ],
)
def test_an_expression_that_was_not_worked_out_is_no_number(answer: str) -> None:
    assert is_unevaluated("72", answer)


@pytest.mark.parametrize(
    "answer",
    [
        "72",
        "-72",
        "x=72",
        "x = -72",
        r"72\text{ cm}",
        "72^{\\circ}",
        r"7.2 \times 10^{1}",
        r"72\%",
        "1{,}072",
        r"\$72",
        *(
            "$72$",
            "£72.50",
            "72 cm",
            "72 cm^2",
            "72 km/h",
            r"72\ \mathrm{m/s^2}",
            "72 square units",
            "72°",
            "7.2e1",
        ),
        *(
            "−72",
            "７２",
            "(72)",
            r"\mathbf{72}",
            r"\approx 72",
            "1 072",
            r"1\,072",
            "72_{10}",
            r"f(3) = 72",
            r"\theta=72",
        ),
        *(
            *(r"72\,\mathrm{m}", r"72\text{ s}", r"72\,\text{ cm}^2", r"72\mathrm{L}", r"72\text{ apples}"),
            *(
                r"72\text{ miles per hour}",
                r"72\text{ in}",
                r"\mathbf{x} = 72",
                r"\mathrm{x} = 72\text{ years}",
            ),
            *(
                r"\text{Answer} = 72",
                r"\mathbf{72}\text{ ways}",
                r"72\text{ square inches}",
                r"72\text{ times}",
                r"12\text{ years from now}",
            ),
        ),
        *(
            "60+12 = 72",
            r"6 \cdot 12 = 72",
            "m+n = 72",
            r"\angle ABC = 72^\circ",
            r"x \approx 72",
            r"x = \frac{1}{3} \approx 0.33",
            "72€",
            r"\frac{1}{2}",
            "1/2",
            r"1\frac{1}{2}",
            r"\frac12",
            r"0.\overline{3}",
            "72 ",
        ),
    ],
)
def test_a_number_in_other_clothes_is_a_value(answer: str) -> None:
    assert not is_unevaluated("72", answer)


def test_only_plain_gold_numbers_ask_for_a_value() -> None:
    assert not is_unevaluated(r"2\sqrt{3}", r"\sqrt{12}")
    assert not is_unevaluated("2x+4y-3=0", "4y=3-2x")
    assert not is_unevaluated("x=4, y=5", "(4,5)")
    assert is_unevaluated("x = 72", "60+12")
    assert is_unevaluated("|AB| = 72", "60+12")


def test_a_fraction_is_a_value_of_a_fraction() -> None:
    assert not is_unevaluated(r"\frac{5}{6}", r"\frac{10}{12}")
    assert not is_unevaluated(r"\frac{5}{6}", r"\frac{-5}{-6}")
    assert not is_unevaluated(r"-\frac{5}{6}", "5/-6")
    assert is_unevaluated("2", r"\frac{-4}{-2}")
    assert is_unevaluated(r"\frac{5}{6}", r"\frac{1}{2}+\frac{1}{3}")
    assert is_unevaluated("0.5", r"\frac{2}{4}")
    assert is_unevaluated("10\\%", "5\\%+5\\%")
    assert is_unevaluated("72 km/h", "144/2")


@pytest.mark.parametrize("piece", ["\\ ", "1,", "a=", "{", "111 ", "and ", "x<1 or ", "\\text{1 a"])
def test_long_answers_are_read_in_no_time(piece: str) -> None:
    answer = piece * (3900 // len(piece)) + "!"
    begun = time.perf_counter()
    readings(r"20\%", answer, "What is it?")
    quick_verdict("72", answer)
    assert time.perf_counter() - begun < 0.5


def test_hostile_answers_are_read_in_no_time() -> None:
    begun = time.perf_counter()
    for piece in (
        "1 ",
        "a ",
        "a/",
        "1,111",
        "\\ ",
        "\\text{",
        "((",
        "=",
        "$ ",
        "^{2}",
        "\\cdot a",
        "\\frac{1}",
    ):
        form_of(piece * (400 // len(piece)))
        form_of("1 " + piece * (390 // len(piece)) + "!")
    assert time.perf_counter() - begun < 2
