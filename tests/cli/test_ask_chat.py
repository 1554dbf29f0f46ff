import asyncio
import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from rich.console import Console
from scripted_solver import Says
from typer.testing import CliRunner

from afm.agents import AgentSpec, save_agent
from afm.cli.ask import ask
from afm.cli.ask_chat import ChatHistory, ChatSession, open_conversation
from afm.errors import UsageError
from afm.models.base import ScriptedModel
from afm.trajectory.io import load_records

CALLER = AgentSpec(
    name="caller",
    roles={
        "ask": {"kind": "tool", "tool": "oracle"},
        "seen": {"kind": "observation"},
        "answer": {"kind": "answer"},
    },
    transitions={"start": ("ask", "answer"), "ask": ("answer",)},
)
app = typer.Typer()
app.command()(ask)


ORACLE = Says("oracle", "\n".join(f"line {number} \x1b[31m" for number in range(20)))


def asker(
    conversation: ChatHistory, script: Callable[[str], str], console: Console | None = None, **context: int
) -> ChatSession:
    model = ScriptedModel(script, **context)
    return ChatSession(
        model, {"oracle": ORACLE}, conversation, 1.0, 0, console or Console(file=io.StringIO())
    )


def test_the_model_reads_the_earlier_turns_again(tmp_path: Path, talker: AgentSpec) -> None:
    heard: list[str] = []

    def speak(text: str) -> str:
        heard.append(text)
        return f"<answer>{len(heard)}</answer>"

    file = tmp_path / "chat.jsonl"
    first = asker(open_conversation(talker, file, None), speak)
    for question in ("one", "two"):
        asyncio.run(first.ask(question))
    again = asker(open_conversation(talker, None, file), speak)
    asyncio.run(again.ask("three"))
    start = f"user: {talker.user_message('one')}\n"
    second = f"{start}assistant: <answer>1</answer>\nuser: Q: two\n"
    third = f"{second}assistant: <answer>2</answer>\nuser: Q: three\n"
    assert heard == [f"{text}assistant: " for text in (start, second, third)]
    saved = load_records(file)
    said = [(turn.id, turn.question, turn.text) for turn in saved]
    asked = enumerate(("one", "two", "three"), 1)
    assert said == [(f"ask-{number}", text, f"<answer>{number}</answer>") for number, text in asked]
    assert bytes(saved[2].prompt_ids or ()).decode() == heard[2]  # what was read, byte for byte


def test_turns_that_no_longer_fit_are_left_out_and_that_is_said(
    capsys: pytest.CaptureFixture[str], talker: AgentSpec
) -> None:
    heard: list[str] = []

    def speak(text: str) -> str:
        heard.append(text)
        return "<answer>" + "x" * 20 + "</answer>"

    room = 2 * (len(talker.user_message("a")) + 100)
    talk = asker(ChatHistory(talker), speak, context_tokens=room)
    for question in "abc":
        asyncio.run(talk.ask(question))
    assert heard[2].startswith(f"user: {talker.user_message('b')}\n")
    assert "Q: a" not in heard[2]
    assert "the 1 oldest turns no longer fit" in capsys.readouterr().err


def test_a_conversation_is_not_overwritten_nor_taken_over_by_another_agent(
    tmp_path: Path, talker: AgentSpec
) -> None:
    file, empty = tmp_path / "chat.jsonl", tmp_path / "empty.jsonl"
    asyncio.run(asker(open_conversation(talker, file, None), lambda _: "<answer>1</answer>").ask("one"))
    empty.write_text("\n")
    for agent, save, resume, message in (
        (talker, file, None, r"exists already; .* --continue"),
        (talker, None, tmp_path / "none.jsonl", "no such file"),
        (talker, None, empty, r"empty.jsonl: is empty; remove it, .* --save"),
        (CALLER, None, file, "used agent talker"),
    ):
        with pytest.raises(UsageError, match=message):
            open_conversation(agent, save, resume)
    copied = open_conversation(talker, tmp_path / "more.jsonl", file)
    asyncio.run(asker(copied, lambda _: "<answer>2</answer>").ask("two"))
    assert [turn.question for turn in load_records(tmp_path / "more.jsonl")] == ["one", "two"]
    assert len(load_records(file)) == 1


def answer_after_call(text: str) -> str:
    return "<answer>done</answer>" if "line 0" in text else "<ask>what\nis it</ask>"


def test_a_terminal_sees_roles_by_name_a_spinner_and_the_beginning_of_an_observation() -> None:
    sink = io.StringIO()
    console = Console(file=sink, force_terminal=True, width=100, color_system="standard", soft_wrap=True)
    asyncio.run(asker(ChatHistory(CALLER), answer_after_call, console).ask("q"))
    shown = sink.getvalue()
    assert "oracle: what is it" in shown  # the spinner, on one line
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "\x1b[31m" not in shown.split("line 0")[1][:12]  # what the tool says cannot paint
    assert "  line 11" in plain
    assert "  line 12" not in plain
    assert "... 9 more lines" in plain  # the tool repeats the two lines of its argument
    assert re.search(r"oracle done after 0\.\d s", plain)
    assert "<answer>" not in plain
    assert "<seen>" not in plain
    assert re.search(r"answer: done \(stopped: answer\)\ncost: \d+ tokens written", plain)
    assert shown.count("\x1b[?25h") == shown.count("\x1b[?25l") > 0  # the cursor is back


def test_elsewhere_the_text_is_what_was_written() -> None:
    sink = io.StringIO()
    asyncio.run(asker(ChatHistory(CALLER), answer_after_call, Console(file=sink)).ask("q"))
    assert sink.getvalue().startswith("<ask>what\nis it</ask>\n<seen>\nline 0 \nline 1 \n")
    assert "working" not in sink.getvalue()


def test_lines_of_standard_input_are_questions(talker_folder: Path, tmp_path: Path) -> None:
    words = ["--model", str(talker_folder), "--seed", "1", "--save", str(tmp_path / "chat.jsonl")]
    done = CliRunner().invoke(app, words, input="one\n\ntwo\n")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("cost: ") == 2
    assert "\x1b" not in done.stdout
    assert [turn.question for turn in load_records(tmp_path / "chat.jsonl")] == ["one", "two"]


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, command: list[str]) -> None:
        self._mine, theirs = pty.openpty()
        variables = os.environ | {"TERM": "xterm", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables, start_new_session=True,
            preexec_fn=self._own,
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    @staticmethod
    def _own() -> None:
        import fcntl
        import signal
        import termios

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell start with it ignored
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def type(self, text: str) -> None:
        os.write(self._mine, text.encode())

    def wait_for(self, pattern: str, since: int = 0, patience_s: float = 60) -> int:
        """Until ``pattern`` is shown after position ``since``; returns where it ends."""
        until = time.monotonic() + patience_s
        while (found := re.compile(pattern).search(self.shown, since)) is None:
            assert time.monotonic() < until, self.shown[-2000:]
            if select.select([self._mine], [], [], 1)[0]:
                self.shown += os.read(self._mine, 1 << 16).decode(errors="replace")
        return found.end()

    def press(self, key: str, pattern: str, since: int) -> int:
        """Press ``key`` until it shows: one that comes as the line editor begins to wait is seen with the next."""
        for _ in range(20):
            self.type(key)
            try:
                return self.wait_for(pattern, since, patience_s=3)
            except AssertionError:
                continue
        return self.wait_for(pattern, since, patience_s=3)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._mine)


@pytest.fixture
def terminal(talker_folder: Path, talker: AgentSpec, tmp_path: Path) -> Iterator[Terminal]:
    """A chat with an agent that may write for minutes."""
    limits = talker.limits.model_copy(update={"max_response_tokens": 1 << 15})
    save_agent(talker.model_copy(update={"limits": limits}), tmp_path / "agent.yaml")
    words = ["--model", str(talker_folder), "--agent", str(tmp_path / "agent.yaml"), "--temperature", "0"]
    opened = Terminal([sys.executable, "-m", "afm.cli.main", "ask", *words, "--threads", "1"])
    yield opened
    opened.close()


@pytest.mark.slow
def test_ctrl_c_ends_an_answer_and_not_the_chat(terminal: Terminal) -> None:
    at = terminal.wait_for("you> ")
    terminal.type("go on and on\n")
    at = terminal.wait_for("reading", at)
    at = terminal.wait_for(r"\x1b\[\?25h", at)  # the spinner has made room for text
    terminal.type("\x03")
    at = terminal.wait_for("stopped; the question", at)
    at = terminal.wait_for("you> ", at)
    terminal.type("/help\n")
    at = terminal.wait_for("Ctrl-C stops an answer", at)
    at = terminal.wait_for("you> ", at)
    terminal.type("again\n")
    at = terminal.wait_for(r"(?s)reading.*?\x1b\[\?25h", at)
    terminal.type("\x03")
    at = terminal.wait_for("you> ", terminal.wait_for("stopped; the question", at))
    at = terminal.wait_for("you> ", terminal.press("\x03", "Ctrl-D ends", at))
    terminal.type("\x04")
    assert terminal.process.wait(timeout=60) == 0
