import pytest

from afm.errors import DataError
from afm.trajectory.programs import unknown_functions, without_last_call


@pytest.mark.parametrize(
    ("code", "rest"),
    [
        ("final_answer(42)", ""),
        ("# done\nfinal_answer(answer=x)  # yes", ""),
        ('final_answer(\n  "a"\n  "b"\n)', ""),
        ("final_answer(x + 1)", "x + 1"),
        ("final_answer(\n  x +\n  1)", "(x +\n  1)"),
        ("é = 'ü'; final_answer(é)", "é = 'ü'; é"),
        ("print(1)\nfinal_answer(x)\n", "print(1)\nx"),
        (
            "# a\x0cb\nx = '\u2028'\nfinal_answer(x)",
            "# a\x0cb\nx = '\u2028'\nx",
        ),  # no ends of lines in Python
        ("x = 1\r\nfinal_answer(x)", "x = 1\r\nx"),
        ("if x:\n    final_answer(x)", None),
        ("final_answer(x)\nprint(1)", None),
        ("final_answer(1)\nfinal_answer(2)", None),
        ("final_answer(1, 2)", None),
        ("final_answer(*x)", None),
        ("print(1)", None),
        ("", None),
    ],
)
def test_the_value_of_the_last_call_stays(code, rest):
    assert without_last_call(code, "final_answer") == rest


@pytest.mark.parametrize("code", ["final_answer(", "-" * 20_000 + "1"])
def test_what_is_no_python_is_told(code):
    with pytest.raises(DataError, match=r"a program is not valid Python: ."):
        without_last_call(code, "final_answer")


@pytest.mark.parametrize(
    ("programs", "names"),
    [
        (["print(stock('nails'))\nx = search(query=stock)"], {"stock", "search"}),
        (["def stock(a):\n    return len(a)\n", "print(stock('nails'))"], set()),
        (["import os.path\nfrom math import sqrt as root\nroot(4); os.getcwd(); sqrt(4)"], {"sqrt"}),
        (["f = lambda g, *h: g(1)\nfor k in (f, len):\n    k(abs)\nclass A: ...\nA()"], set()),
        (["try:\n    pass\nexcept E as e:\n    e()\nasync def d(): ...\nd()"], set()),
        (["from shop import *\nstock('nails')"], set()),
        (["1 +", "stock()"], {"stock"}),
    ],
)
def test_functions_that_no_program_of_a_run_defines(programs, names):
    assert unknown_functions(programs) == names
