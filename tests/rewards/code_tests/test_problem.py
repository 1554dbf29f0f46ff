"""The layouts of tests in rows, including packed ones, and malicious pickles."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afm.errors import DataError
from afm.rewards.code_tests.problem import (
    CallCase,
    PrintCase,
    PrivateTests,
    Problem,
    pickled_string,
    question_id,
    read_problem,
    unpacked,
)

ONE = Problem(printing=(PrintCase("1\n", "2\n"),))


def packed(value: Any, protocol: int | None = None) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


def packed_cases(*cases: dict[str, str]) -> str:
    return packed(json.dumps(cases))


@pytest.mark.parametrize(
    "truth",
    [
        {"stdin": ["1\n"], "expected_output": ["2\n"]},
        json.dumps({"stdin": ["1\n"], "expected_output": ["2\n"], "question_id": "x"}),
        {"input_output": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})},
        {"public_tests": {"input": ["1\n"], "output": ["2\n"]}},
        [{"input": "1\n", "output": "2\n", "testtype": "stdin"}],
        {"target": '[{"input": "1\\n", "output": "2\\n"}]'},
        {"public_test_cases": '[{"input": "1\\n", "output": "2\\n"}]', "private_test_cases": ""},
        {"public_test_cases": "[]", "private_test_cases": packed_cases({"input": "1\n", "output": "2\n"})},
    ],
)
def test_standard_input_and_output(truth: Any) -> None:
    assert read_problem(truth) == ONE


def test_lines_as_lists() -> None:
    assert read_problem({"inputs": [["1", "2"]], "outputs": [["3"]]}).printing == (PrintCase("1\n2", "3"),)


def test_function_calls_of_livecodebench() -> None:
    cases = [{"input": '[1, 2]\r\n"a\u2028b"', "output": "true", "testtype": "functional"}]
    problem = read_problem({"private_test_cases": packed_cases(*cases)}, {"metadata": '{"func_name": "f"}'})
    assert problem == Problem(calling=(CallCase(([1, 2], "a\u2028b"), True),), function="f")


def test_function_calls_of_apps() -> None:
    problem = read_problem({"fn_name": "f", "inputs": [[[1, 2], "5"]], "outputs": [["5"]]})
    assert problem == Problem(calling=(CallCase(([1, 2], "5"), ["5"], wrapped=True),), function="f")


@pytest.mark.parametrize(
    ("truth", "tests"),
    [
        ({"functional": "assert f(1) == 2"}, "assert f(1) == 2"),
        ({"test_list": ["assert f(1)", "assert g()"]}, "assert f(1)\nassert g()"),
        (["assert f(1)"], "assert f(1)"),
        ({"target": ["assert f(1)"]}, "assert f(1)"),
        ({"test_setup_code": "import math", "test_list": ["assert f()"]}, "import math\nassert f()"),
        (
            {"entry_point": "f", "test": "def check(candidate):\n    assert candidate(1)"},
            "def check(candidate):\n    assert candidate(1)\ncheck(f)",
        ),
    ],
)
def test_test_programs(truth: Any, tests: str) -> None:
    assert read_problem(truth).tests == tests


def test_a_checker_needs_no_outputs() -> None:
    problem = read_problem({"inputs": ["1"], "checker": "print(1)"})
    assert problem == Problem(printing=(PrintCase("1", None),), checker="print(1)")


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("", "got text, expected an object with tests"),
        ({"question_id": "x"}, r"it has \['question_id'\]; expected one of: stdin"),
        ({"stdin": ["1"], "expected_output": []}, "1 inputs and 0 outputs"),
        ([{"input": "1"}], r"a test case has \['input'\], expected input and output"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "without a function name"),
        ({"inputs": ["1", "2"], "outputs": ["1", None]}, "the output of a test case is null"),
        ([{"input": "1", "output": None}], "the output of a test case is null"),
        ({"private_test_cases": "rubbish!"}, "neither base64 nor zlib"),
        ({"public_test_cases": {"a": 1}}, "expected a list of test cases"),
        *((gold, "a list of results, expected tests") for gold in ('["204"]', ["(1, 2)"], {"target": ["4"]})),
    ],
)
def test_rows_without_usable_tests(truth: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_problem(truth)


def test_every_real_row_has_tests(shared: Callable[[str], Path]) -> None:
    import pyarrow.parquet as pq

    rows = pq.read_table(shared("data/code_math/livecodebench_v4.parquet")).to_pylist()
    problems = [read_problem(row["reward_model"]["ground_truth"], row["extra_info"]) for row in rows]
    assert sum(bool(problem.printing) for problem in problems) == 65
    assert sum(bool(problem.tests) and bool(problem.function) for problem in problems) == 35


def test_complete_tests_are_found_by_their_problem(tmp_path: Path) -> None:
    rows = [
        {"question_id": f"q{number}", "question_content": "é" * number, "private_test_cases": packed_cases()}
        for number in range(5)
    ]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    (tmp_path / "test2.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[3:])
    )
    tests = PrivateTests(tmp_path)
    assert [tests.row(f"q{number}") for number in range(5)] == rows
    assert tests.row("q9") is None
    assert question_id('{"question_id": "q1"}') == "q1"
    with pytest.raises(DataError, match=r"no LiveCodeBench files; expected a \.jsonl file"):
        PrivateTests(tmp_path / "none").row("q1")


@pytest.mark.parametrize("protocol", [1, 2, 5])
@pytest.mark.parametrize("text", ["", "ü€\U0001f600\ud800", "x" * 300, "y" * 70_000], ids=len)
def test_a_string_comes_back_in_every_protocol(text: str, protocol: int) -> None:
    assert unpacked(packed(text, protocol)) == text


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_pickle_with_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    text = packed(Evil(target))
    with pytest.raises(DataError, match=r"the pickle has opcode \w+, expected one string and no more"):
        unpacked(text)
    assert not target.exists()
    pickle.loads(zlib.decompress(base64.b64decode(text)))  # it would have run
    assert target.exists()


@pytest.mark.parametrize("value", [["a"], {"a": 1}, 5, None, b"bytes", ("a", "b"), len])
def test_anything_but_a_string_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match="expected one"):
        unpacked(packed(value))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", ""),
        (b".", ""),
        (b"junk", ""),
        (b"\x80\x04\x8d" + b"\xff" * 8, ""),
        (b"\x80\x04X\xff\xff\xff\x7fa.", ""),
        (b"\x80\x04\x8c\x01a\x8c\x01b.", "the pickle has 2 strings, expected one"),
    ],
)
def test_damaged_pickles(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"packed tests: .*{message}"):
        pickled_string(data)


def test_a_bomb_is_bounded() -> None:
    with pytest.raises(DataError, match="holds more than 1000000 bytes"):
        unpacked(packed("0" * 50_000_000), max_bytes=1_000_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("%%%", "neither base64 nor zlib"),
        ("QUJD", "neither base64 nor zlib"),
        (packed("x" * 99)[:-8], "is cut off"),
    ],
)
def test_damaged_packing(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        unpacked(text)
