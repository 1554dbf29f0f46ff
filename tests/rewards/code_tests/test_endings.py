"""What a program's case prints at its very end is part of its answer."""

from __future__ import annotations

import pytest
from answered import answered

from afm.rewards.code_tests import CodeTests

pytestmark = pytest.mark.sandbox

DOUBLES = {"stdin": ["7\n", "21\n"], "expected_output": ["14\n", "42\n"]}


@pytest.mark.parametrize(
    "program",
    [
        "import math\nmath.out = open(1, 'wb', closefd=False)\nmath.out.write(b'%d' % (int(input()) * 2))",
        "class Last:\n    def __init__(self): self.answer = int(input()) * 2\n"
        "    def __del__(self): print(self.answer)\nlast = Last()",
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print(int(input()) * 2))).start()",
    ],
)
async def test_what_python_prints_at_the_end_counts(program: str, evaluation: CodeTests) -> None:
    part = await evaluation.judge(answered("code", "lcbv5", program, DOUBLES))
    assert (part.score, part.evidence) == (1.0, "2/2 cases pass")


async def test_an_output_that_cannot_be_written_fails(evaluation: CodeTests) -> None:
    program = "import os\nprint(int(input()) * 2, end='')\nos.close(1)"
    part = await evaluation.judge(answered("code", "lcbv5", program, DOUBLES))
    assert part.score == 0.0
