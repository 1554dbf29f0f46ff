"""Programs that hand an answer over, without doing so."""

from __future__ import annotations

import pytest

from afm.errors import DataError
from afm.trajectory.programs import without_last_call


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


def test_what_is_no_python_is_told():
    with pytest.raises(DataError, match="a program is no Python"):
        without_last_call("final_answer(", "final_answer")
