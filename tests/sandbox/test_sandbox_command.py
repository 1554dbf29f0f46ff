"""``afm sandbox run`` as a person or a script uses it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from afm.cli.sandbox import app
from afm.errors import UsageError

pytestmark = pytest.mark.sandbox
RUNNER = CliRunner()


@pytest.mark.slow
def test_check_prints_a_table_and_ends_well() -> None:
    done = RUNNER.invoke(app, ["check", "--only", "daemon"])
    assert done.exit_code == 0
    assert "leave a daemon behind" in done.stdout
    assert "4 stopped, 0 known limit, 0 GOT THROUGH" in done.stdout


def test_a_failing_program_ends_with_status_1_and_says_why() -> None:
    done = RUNNER.invoke(app, ["run"], input="print('first')\n1/0")
    assert (done.exit_code, done.stdout) == (1, "first\n")
    assert "ZeroDivisionError" in done.stderr
    assert "[error, exit status 1; " in done.stderr


def test_json_and_stdin_from_a_file(tmp_path: Path) -> None:
    given = tmp_path / "a file.txt"
    given.write_text("é\n", encoding="utf-8")
    done = RUNNER.invoke(app, ["run", "--json", "--stdin", str(given)], input="print(input() * 2)")
    result = json.loads(done.stdout)
    assert (done.exit_code, result["stdout"], result["reason"]) == (0, "éé\n", "ok")


def test_bytes_that_are_no_text_are_refused_and_never_replaced(tmp_path: Path) -> None:
    given = tmp_path / "given.txt"
    given.write_bytes(b"Gr\xfc\xdfe\n")
    for words, program in (
        (["run"], "print(1)".encode("utf-16")),
        (["run", "--stdin", str(given)], b"print(1)"),
    ):
        done = RUNNER.invoke(app, words, input=program)
        assert isinstance(done.exception, UsageError)
        assert "is not UTF-8, expected text; save it as UTF-8" in str(done.exception)


def test_a_closed_standard_input_holds_no_program() -> None:
    words = f"{shlex.quote(sys.executable)} -m afm.cli.main sandbox run <&-"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: afm sandbox run: no program on standard input; try: echo ")


@pytest.mark.slow
def test_after_the_set_up_numpy_and_sympy_are_not_installed_again() -> None:
    done = RUNNER.invoke(app, ["install", "--missing", "numpy", "sympy"])
    assert (done.exit_code, done.stdout) == (0, "")


def test_json_holds_nothing_that_a_terminal_obeys() -> None:
    code = r"print('\x1b[2J\x9b31m\u202eevil\u2066\u061c\u200f\u2028é')"
    done = RUNNER.invoke(app, ["run", "--json"], input=code)
    assert done.stdout.isascii()
    assert done.stdout.strip().isprintable()
    assert json.loads(done.stdout)["stdout"] == "\x1b[2J\x9b31m\u202eevil\u2066\u061c\u200f\u2028é\n"


@pytest.mark.parametrize("words", [["run"], ["check", "--only", "no such attack"]])
def test_no_program_and_no_attack_are_wrong_usage(words: list[str]) -> None:
    done = RUNNER.invoke(app, words, input="\n")
    assert isinstance(done.exception, UsageError)
