"""The code tool: what an agent writes, and what it is shown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from afm.errors import BadArgumentError, SandboxError
from afm.sandbox import ExitReason, RunResult, SandboxLimits, open_sandbox
from afm.tools import ToolResult
from afm.tools.code import NOTHING_PRINTED, CodeTool, cut_middle, observation
from afm.trajectory.programs import FencedProgram, parse_program, program_argument

LIMITS = SandboxLimits()


@pytest.mark.parametrize(
    ("module", "note"),
    [
        (
            "sympy",
            "\n(sympy is not installed in the sandbox; `afm sandbox install sympy` installs it.)",
        ),
        ("sympi", ""),
    ],
)
async def test_a_usual_package_that_is_missing_is_named_with_its_command(module: str, note: str) -> None:
    tool = CodeTool(open_sandbox("bubblewrap", packages=[]))
    try:
        shown = await tool.call(f"```py\nimport {module}\n```")
    finally:
        await tool.close()
    assert shown.text.endswith(f"ModuleNotFoundError: No module named '{module}'{note}")


@pytest.mark.parametrize(
    ("argument", "program"),
    [
        ("```py\nprint(1)\n```", FencedProgram("print(1)\n")),
        ("\nI will add.\n```python\na = 1\n\nprint(a)\n```\nthen\n", FencedProgram("a = 1\n\nprint(a)\n")),
        ("```Python3\nprint(1)\n```", FencedProgram("print(1)\n")),
        ("```py\nprint(input())\n```\n```sh\n3 4\n5\n```", FencedProgram("print(input())\n", "3 4\n5\n")),
        ("```sh\nhello\n```\n```py\nprint(input())\n```", FencedProgram("print(input())\n", "hello\n")),
        ("```py\nprint(1)```", FencedProgram("print(1)")),
        ("```py\nprint('```')\nprint(2)\n```", FencedProgram("print('```')\nprint(2)\n")),
        ("```text\nnot this\n```\n```py\nprint(1)\n```", FencedProgram("print(1)\n")),
        ("```py\r\nprint(1)\r\n```\r\n", FencedProgram("print(1)\r\n")),
        ("```python3.11\nprint(1)\n```", FencedProgram("print(1)\n")),
        ("```python main.py\nprint(1)\n```", FencedProgram("print(1)\n")),
        (
            '```py title="a b"\nprint(input())\n```\n```sh stdin\n5\n```',
            FencedProgram("print(input())\n", "5\n"),
        ),
        ("```c++ x\nint\n```\n```py\nprint(1)\n```", FencedProgram("print(1)\n")),
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
        ("```py print(1) ```", "found no program"),
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
        ("\n  x = 1\n", "\n```py\n  x = 1\n```\n"),
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
    with pytest.raises(BadArgumentError, match="a program holds a fenced program in one of its strings"):
        program_argument('"""Use:\n```py\nhelp()\n```\n"""\nprint(1)')


def test_a_hostile_fence_takes_no_time() -> None:
    begun = time.monotonic()
    for argument in ("```" + " " * 500_000 + "`", "```py" + " x" * 250_000 + "`", "`" * 500_000):
        with pytest.raises(BadArgumentError):
            parse_program(argument)
    assert time.monotonic() - begun < 2


def run(
    stdout: str = "", stderr: str = "", status: int | None = 0, reason: ExitReason = ExitReason.OK
) -> RunResult:
    return RunResult(stdout, stderr, status, reason, wall_s=0.1, cpu_s=0.1)


def shown(result: RunResult, max_chars: int = 1536) -> str:
    return observation(result, LIMITS, max_chars)


def test_output_is_shown_without_the_line_end() -> None:
    assert shown(run("  2\n\n")) == "  2"


def test_silence_is_pointed_out() -> None:
    assert shown(run("\n")) == NOTHING_PRINTED
    assert "print()" in NOTHING_PRINTED


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (
            run("1\n", "", None, ExitReason.TIMEOUT),
            "1\n(The program was stopped: it ran longer than 7 seconds.)",
        ),
        (run("", "", None, ExitReason.CPU), "(The program was stopped: it computed longer than 5 seconds.)"),
        (
            run("", "MemoryError\n", None, ExitReason.MEMORY),
            "MemoryError\n(The program needed more than 1024 MiB of memory.)",
        ),
        (
            run("yy", "", None, ExitReason.OUTPUT),
            "yy\n(The program was stopped: it printed more than 65536 bytes.)",
        ),
        (run("", "", -9, ExitReason.KILLED), "(The program was killed.)"),
        (run("", "", -11, ExitReason.ERROR), "(The program crashed: SIGSEGV.)"),
        (run("", "", 3, ExitReason.ERROR), "(The program ended with exit status 3.)"),
        (run("a\n", "no luck\n", 1, ExitReason.ERROR), "a\nno luck"),
    ],
)
def test_every_ending_is_told(result: RunResult, text: str) -> None:
    assert shown(result) == text


def test_addresses_do_not_differ_between_runs() -> None:
    assert shown(run("<object object at 0x7f3a5c0b4190>\n")) == "<object object at 0x...>"
    assert shown(run("0x7f3a5c0b4190 look at 0x7f3a5c0b4190\n")) == "0x7f3a5c0b4190 look at 0x7f3a5c0b4190"


def test_addresses_of_code_and_numbers_of_threads_do_not_differ_either() -> None:
    told = '<code object f at 0x7f3a5c0b4190, file "main.py", line 1> <Thread(T-1, started 140234567890123)>'
    assert shown(run(told)) == '<code object f at 0x..., file "main.py", line 1> <Thread(T-1, started ...)>'


def test_output_cannot_steer_a_terminal() -> None:
    result = run("\x1b]0;title\x07\x1b[31mred\x1b[0m\n", "\x1b[1mTraceback\x07\n", 1, ExitReason.ERROR)
    assert shown(result) == "red\nTraceback\\x07"


def test_long_text_keeps_head_and_tail() -> None:
    text = "".join(f"{number:04d}" for number in range(1000))
    cut = cut_middle(text, 200)
    # 200 less the mark "\n[... 4000 characters cut ...]\n" of 31 leaves 169: 85 before it, 84 behind.
    assert cut == text[:85] + "\n[... 3831 characters cut ...]\n" + text[-84:]
    assert len(cut) == 200
    assert cut_middle(text[:200], 200) == text[:200]


def test_the_reason_survives_a_cut() -> None:
    text = shown(run("y" * 60000, "", None, ExitReason.OUTPUT), 300)
    assert len(text) == 300
    assert text.endswith("y\n(The program was stopped: it printed more than 65536 bytes.)")


class BrokenSandbox:
    """A sandbox whose machinery fails."""

    async def run(self, code: str, stdin: str = "", limits: SandboxLimits | None = None) -> RunResult:
        raise SandboxError("the jail did not start: no space left on device")

    async def close(self) -> None:
        pass


async def test_a_broken_sandbox_is_told_in_words_and_marked() -> None:
    result = await CodeTool(BrokenSandbox()).call("```py\nprint(1)\n```")
    assert not result.ok
    assert result.text == (
        "The code tool failed, the program did not run: the jail did not start: no space left on device"
    )
    assert result.meta["reason"] == "sandbox"


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
    result = await tool.call(
        "```py\nimport json\n\ndef load(text):\n    return json.loads(text)\n\nload('{')\n```"
    )
    assert result.ok
    assert result.text.splitlines() == [
        "Traceback (most recent call last):",
        '  File "main.py", line 6, in <module>',
        "    load('{')",
        '  File "main.py", line 4, in load',
        "    return json.loads(text)",
        "           ^^^^^^^^^^^^^^^^",
        "json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)",
    ]


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
async def test_a_deep_recursion_leaves_room_for_what_was_printed(tool: CodeTool) -> None:
    program = "def f(n):\n    return g(n)\ndef g(n):\n    return f(n)\nprint('begin')\nf(0)"
    text = (await tool.call(f"```py\n{program}\n```")).text
    assert text.startswith("begin\nTraceback")
    assert "frames cut" in text
    assert text.endswith("RecursionError: maximum recursion depth exceeded")
    assert len(text) < 1200


@pytest.mark.sandbox
async def test_nothing_an_agent_writes_raises(tool: CodeTool) -> None:
    for argument in (
        "",
        "\0",
        "```py\n\0\n```",
        "```py\n\ud800\n```",
        "```py\n```",
        "`" * 500,
        "```py\n" + "(" * 5000 + "\n```",
    ):
        result = await tool.call(argument)
        assert isinstance(result, ToolResult)
        assert result.ok
        assert 0 < len(result.text) <= 1536


@pytest.mark.sandbox
async def test_input_beyond_the_limit_is_refused_in_words() -> None:
    tool = CodeTool(open_sandbox(), limits=SandboxLimits(stdin_bytes=10))
    result = await tool.call("```py\n1\n```\n```sh\n0123456789\n```")
    assert result.ok
    assert result.text == "Nothing was run: stdin is 11 bytes long, expected at most 10."
    await tool.close()
