"""The source of the programs that run in the sandbox."""

from __future__ import annotations

import re

import pytest

from afm.rewards.code_tests.runner import mentioning, program, shared_modules
from afm.sandbox.interpreter import WARM

PROGRAMS = [("plain", "shutdown", "serve", "candidate"), ("plain", "proxies", "judge")]


@pytest.mark.parametrize("names", PROGRAMS)
def test_they_are_programs_and_need_nothing_of_the_project(names: tuple[str, ...]) -> None:
    text = program(*names)
    compile(text, "inside", "exec")
    assert not re.search(r"^\s*(?:from|import) afm", text, re.MULTILINE)


@pytest.mark.parametrize("names", PROGRAMS)
def test_they_mention_no_package_so_that_forks_stay_small(names: tuple[str, ...]) -> None:
    """A program that mentions one runs in a large warm interpreter, whose forks cost ten times as much."""
    words = set(re.findall(r"\w+", program(*names)))
    assert not words & {name for group in WARM for name in group}


def test_what_a_program_imports_is_mentioned() -> None:
    source = "import os, sys\nimport numpy as np\n  from sympy import S\nimport mine\n# import scipy\nx = 'import heapq'"
    assert shared_modules(source) == ["numpy", "sympy"]
    assert mentioning("x = 1\n", ["numpy", "sympy"]) == "x = 1\n# for numpy sympy\n"
    assert mentioning("x = 1\n", []) == "x = 1\n"
