"""The code tool: what an agent writes, and what it is shown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from afm.errors import BadArgumentError
from afm.sandbox import ExitReason, RunResult, SandboxLimits, open_sandbox
from afm.tools.code import NOTHING_PRINTED, CodeTool, cut_middle, observation
from afm.tools.remote import RemoteSandbox
from afm.trajectory.programs import FencedProgram, parse_program, program_argument

LIMITS = SandboxLimits()


@pytest.mark.parametrize(
    ("module", "note"),
    [
        ("sympy", "\n(sympy is not installed in the sandbox; `afm sandbox install sympy` installs it.)"),
        ("sympi", ""),
    ],
)
async def test_a_usual_package_that_is_missing_is_named_with_its_command(module: str, note: str) -> None:
    tool = CodeTool(open_sandbox("bubblewrap", packages=[]))
    shown = await tool.call(f"```py\nimport {module}\n```")
    await tool.close()
    assert shown.text.endswith(f"ModuleNotFoundError: No module named '{module}'{note}")


ONE = FencedProgram("print(1)\n")


@pytest.mark.parametrize(
    ("argument", "program"),
    [
        ("```py\nprint(1)\n```", ONE),
        ("\nI will add.\n```python\na = 1\n\nprint(a)\n```\nthen\n", FencedProgram("a = 1\n\nprint(a)\n")),
        ("```py\nprint(input())\n```\n```sh\n3 4\n5\n```", FencedProgram("print(input())\n", "3 4\n5\n")),
        ("```sh\nhello\n```\n```py\nprint(input())\n```", FencedProgram("print(input())\n", "hello\n")),
        ("```py\nprint(1)```", FencedProgram("print(1)")),
        ("```py\nprint('```')\nprint(2)\n```", FencedProgram("print('```')\nprint(2)\n")),
        ("```py\r\nprint(1)\r\n```\r\n", FencedProgram("print(1)\r\n")),
        ("```python3.11\nprint(1)\n```", ONE),
        ('```py title="a b"\nprint(1)\n```\n```sh stdin\n5\n```', FencedProgram("print(1)\n", "5\n")),
        ("```c++ x\nint\n```\n```py\nprint(1)\n```", ONE),
    ],
)
def test_programs_are_found(argument: str, program: FencedProgram) -> None:
    assert parse_program(argument) == program


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ("", "found no program"),
        ("print(1)", "found no program"),
        ("```\nprint(1)\n```", "found no program"),
        ("```sh\nls\n```", "found no program"),
        ("```pypy\nprint(1)\n```", "found no program but a block of 'pypy'"),
        ("```javascript\n1\n```\n```\n2\n```", "found no program but blocks of 'javascript' and no language"),
        ("```py\nprint(1)\n", "never closed"),
        ("```py\n1\n```\n```py\n2\n```", "found 2 programs"),
    ],
)
def test_a_missing_program_is_explained(argument: str, complaint: str) -> None:
    with pytest.raises(BadArgumentError, match=complaint) as caught:
        parse_program(argument)
    assert "```py" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("print(1)", "\n```py\nprint(1)\n```\n"),
        ("print('```')", "\n```py\nprint('```')\n```\n"),
        ("```py\nprint(1)\n```", "```py\nprint(1)\n```"),
        ("Run:\n```python\n1\n```\n```sh\n2\n```", "Run:\n```python\n1\n```\n```sh\n2\n```"),
        ('x = """\n```\n"""', 'x = """\n```\n"""'),  # the fence would end in the middle
        ("```\nprint(1)\n```", "```\nprint(1)\n```"),
        (" \n", " \n"),
    ],
)
def test_a_program_gets_the_fence_that_the_tool_reads(text: str, argument: str) -> None:
    assert program_argument(text) == argument
    assert program_argument(argument) == argument


def test_a_program_that_quotes_another_in_a_fence_is_not_taken_for_that_one() -> None:
    with pytest.raises(BadArgumentError, match="a program holds a fenced program in a string"):
        program_argument('"""Use:\n```py\nhelp()\n```\n"""\nprint(1)')


def test_a_hostile_fence_takes_no_time() -> None:
    begun = time.monotonic()
    for argument in ("```" + " " * 500_000 + "`", "```py" + " x" * 250_000 + "`", "`" * 500_000):
        with pytest.raises(BadArgumentError):
            parse_program(argument)
    assert time.monotonic() - begun < 2


def shown(
    stdout: str = "",
    stderr: str = "",
    status: int | None = 0,
    reason: ExitReason = ExitReason.OK,
    max_chars: int = 1536,
) -> str:
    """What an agent is shown of a run."""
    return observation(RunResult(stdout, stderr, status, reason, wall_s=0.1, cpu_s=0.1), LIMITS, max_chars)


ERROR = ExitReason.ERROR
SAME = "0x7f3a5c0b4190 look at 0x7f3a5c0b4190"
CODE = '<code object f at 0x7f3a5c0b4190, file "main.py", line 1> <Thread(T-1, started 140234567890123)>'


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (("  2\n\n",), "  2"),
        (("\n",), NOTHING_PRINTED),
        (
            ("1\n", "", None, ExitReason.TIMEOUT),
            "1\n(The program was stopped: it ran longer than 7 seconds.)",
        ),
        (("", "", None, ExitReason.CPU), "(The program was stopped: it computed longer than 5 seconds.)"),
        (("", "No\n", None, ExitReason.MEMORY), "No\n(The program needed more than 1024 MiB of memory.)"),
        (("", "", -9, ExitReason.KILLED), "(The program was killed.)"),
        (("", "", -11, ERROR), "(The program crashed: SIGSEGV.)"),
        (("", "", 3, ERROR), "(The program ended with exit status 3.)"),
        (("a\n", "no luck\n", 1, ERROR), "a\nno luck"),
        (("<object object at 0x7f3a5c0b4190>\n",), "<object object at 0x...>"),
        ((SAME,), SAME),
        ((CODE,), '<code object f at 0x..., file "main.py", line 1> <Thread(T-1, started ...)>'),
        (("\x1b]0;title\x07\x1b[31mred\x1b[0m\n", "\x1b[1mTraceback\x07\n", 1, ERROR), "red\nTraceback\\x07"),
    ],
)
def test_every_ending_is_told_and_nothing_differs_between_runs_or_steers_a_terminal(
    result: tuple[Any, ...], text: str
) -> None:
    assert shown(*result) == text


def test_long_text_keeps_head_and_tail() -> None:
    text = "".join(f"{number:04d}" for number in range(1000))
    cut = cut_middle(text, 200)
    # 200 less the mark "\n[... 4000 characters cut ...]\n" of 31 leaves 169: 85 before it, 84 behind.
    assert cut == text[:85] + "\n[... 3831 characters cut ...]\n" + text[-84:]
    assert len(cut) == 200
    assert cut_middle(text[:200], 200) == text[:200]


def test_the_reason_survives_a_cut() -> None:
    text = shown("y" * 60000, "", None, ExitReason.OUTPUT, 300)
    assert len(text) == 300
    assert text.endswith("y\n(The program was stopped: it printed more than 65536 bytes.)")


async def test_a_broken_sandbox_is_told_in_words_and_marked() -> None:
    tool = CodeTool(RemoteSandbox(["http://127.0.0.1:9"], rounds=1))
    result = await tool.call("```py\nprint(1)\n```")
    await tool.close()
    assert (result.ok, result.meta["reason"]) == (False, "sandbox")
    assert result.text.startswith("The code tool failed, the program did not run: ")


@pytest.fixture
async def tool() -> AsyncIterator[CodeTool]:
    made = CodeTool(open_sandbox())
    yield made
    await made.close()


@pytest.mark.sandbox
async def test_a_program_runs_with_its_input(tool: CodeTool) -> None:
    result = await tool.call("```py\nn = int(input())\nprint(n * 2)\n```\n```sh\n21\n```")
    assert result.ok
    assert result.text == "42"
    assert (result.meta["reason"], result.meta["exit_status"]) == ("ok", 0)


@pytest.mark.sandbox
async def test_a_traceback_ends_at_the_agents_own_code(tool: CodeTool) -> None:
    program = "import json\n\ndef load(text):\n    return json.loads(text)\n\nload('{')"
    result = await tool.call(f"```py\n{program}\n```")
    assert result.ok
    assert result.text.startswith(
        "Traceback (most recent call last):\n"
        "  File \"main.py\", line 6, in <module>\n    load('{')\n"
        '  File "main.py", line 4, in load\n    return json.loads(text)\n           ^^^^^^^^^^^^^^^^\n'
        "json.decoder.JSONDecodeError: Expecting property name"
    )


@pytest.mark.sandbox
async def test_the_same_failure_gives_the_same_text(tool: CodeTool) -> None:
    argument = "```py\nprint({'b', 'a', 'c'}, object())\nimport threading\nthreading.Thread(target=int, args=('x',)).start()\n```"
    results = await asyncio.gather(*(tool.call(argument) for _ in range(3)))
    assert len({result.text for result in results}) == 1
    assert "/usr" not in results[0].text


@pytest.mark.sandbox
async def test_bytes_that_are_no_text_and_escapes_are_shown_harmlessly(tool: CodeTool) -> None:
    program = "import os\nos.write(1, b'\\xff\\xfe\\x1b[2J\\x00 \\xc3\\xa9\\n')\nos.write(2, b'\\x9b31m\\n')"
    result = await tool.call(f"```py\n{program}\n```")
    assert result.text == "\ufffd\ufffd\\x00 \u00e9\n\ufffd31m"


@pytest.mark.sandbox
async def test_nothing_an_agent_writes_raises(tool: CodeTool) -> None:
    programs = ("\0", "\ud800", "", "(" * 5000)
    for argument in ("", "\0", "`" * 500, *(f"```py\n{program}\n```" for program in programs)):
        result = await tool.call(argument)
        assert result.ok
        assert 0 < len(result.text) <= 1536


@pytest.mark.sandbox
async def test_input_beyond_the_limit_is_refused_in_words() -> None:
    tool = CodeTool(open_sandbox(), limits=SandboxLimits(stdin_bytes=10))
    result = await tool.call("```py\n1\n```\n```sh\n0123456789\n```")
    assert result.ok
    assert result.text == "Nothing was run: stdin is 11 bytes long, expected at most 10."
    await tool.close()
