"""A conversation with one loaded model: its turns, the loop of questions, and the live view of an episode."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from afm.agents import AgentSpec, PromptSource
from afm.errors import AfmError, EngineError, UsageError, no_such_file
from afm.palette import ROLE_STYLES, terminal_style
from afm.rollout import CallFinished, CallStarted, Episode, EpisodeEvent, Stopped, TextWritten
from afm.terminal import plural, visible
from afm.trajectory import answers

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from afm.evaluation.prices import Prices
    from afm.models import TokenModel
    from afm.tools import Tool
    from afm.trajectory.record import Record


@dataclass(slots=True)
class ChatHistory:
    """Finished turns with one agent, oldest first. New turns are appended to ``file``."""

    spec: AgentSpec
    turns: list[Record] = field(default_factory=list)
    file: Path | None = None
    source: PromptSource = field(default_factory=PromptSource)

    def prompt(self, model: TokenModel, question: str) -> tuple[list[int], int]:
        """Return token ids of the earlier turns and the question, and how many of the oldest turns were left out.

        Turns are left out until half of the model's context is free for the answer. The first remaining turn contains
        the agent's instruction.
        """
        for left_out in range(len(self.turns) + 1):
            ids = model.encode_prompt(self._messages(self.turns[left_out:], question))
            if len(ids) <= model.context_tokens // 2:
                break
        return ids, left_out

    def add(self, record: Record) -> None:
        """Add a finished turn, also to the file."""
        from afm.trajectory.io import RecordWriter

        self.turns.append(record)
        if self.file is not None:
            with RecordWriter(self.file) as writer:
                writer.write(record)

    def next_id(self) -> str:
        """Return the id of the next turn."""
        return f"ask-{len(self.turns) + 1}" if self.file or self.turns else "ask"

    def _messages(self, turns: list[Record], question: str) -> list[dict[str, str]]:
        messages: list[dict[str, str]] = []
        for asked, answer in [*((turn.question, turn.text) for turn in turns), (question, None)]:
            short = self.spec.question_format.replace("{question}", asked)
            first = [] if messages else self.source.messages(self.spec, asked)
            messages += first or [{"role": "user", "content": short}]
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return messages


def open_conversation(
    spec: AgentSpec, save: Path | None, resume: Path | None, source: PromptSource | None = None
) -> ChatHistory:
    """Open the conversation that the options name.

    Args:
        save: File to write; it must not exist.
        resume: File whose turns come first. New turns are appended to it unless ``save`` names another file.
    """
    from afm.trajectory.io import RecordWriter, load_records

    if save is not None and save.exists():
        raise UsageError(
            f"--save {save}: exists already; choose another file, or continue it with --continue {save}"
        )
    if save is not None:
        _try_to_write(save)
    turns: list[Record] = []
    if resume is not None:
        if not resume.is_file():
            raise UsageError(
                f"--continue {resume}: {no_such_file(resume)}; expected a file that --save wrote"
            )
        turns = load_records(resume)
        if not turns:
            raise UsageError(
                f"--continue {resume}: is empty; remove it, and start a conversation with --save {resume}"
            )
        others = sorted({turn.agent for turn in turns if turn.agent_digest != spec.digest})
        if others:
            raise UsageError(
                f"--continue {resume}: the conversation used agent {', '.join(others)}, whose declaration differs from that of "
                f"{spec.name!r}; choose that agent with --agent, or start a new conversation with --save"
            )
    if save is not None and turns:
        with RecordWriter(save) as writer:
            for turn in turns:
                writer.write(turn)
    return ChatHistory(spec, turns, save or resume, source or PromptSource())


def _try_to_write(save: Path) -> None:
    """Raise before any work if the file of ``--save`` cannot be made."""
    try:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.touch(exist_ok=False)
        save.unlink()
    except OSError as error:
        raise UsageError(f"--save {save}: {error.strerror}; choose a file in another folder") from None


_HELP = "/new forgets what was said, /help shows this, /quit or Ctrl-D ends; Ctrl-C stops an answer."
_PROMPT = "you> "


@dataclass(frozen=True, slots=True)
class ChatSession:
    """A model, its tools and its sampling. Without a ``console`` only records are printed."""

    model: TokenModel
    tools: Mapping[str, Tool]
    conversation: ChatHistory
    temperature: float
    seed: int | None
    console: Console | None
    prices: Prices | None = None

    async def ask(self, question: str) -> Record:
        """Answer one question, shown live or as a line of JSON, and add it to the conversation."""
        from afm.models import SamplingParams
        from afm.rollout import episode_record, run_episode

        spec = self.conversation.spec
        view = None
        if self.console is not None:
            view = EpisodeView(spec, self.console, self.prices)
        prompt, left_out = self.conversation.prompt(self.model, question)
        if left_out:
            print(f"the {left_out} oldest turns no longer fit and were left out", file=sys.stderr)
        if len(prompt) >= (room := self.model.context_tokens):
            text = f"the prompt has {len(prompt):,} tokens, but the context is {room:,} tokens"
            raise EngineError(f"{text}; shorten the question, or raise --context-tokens")
        try:
            if view:
                view.begin()
            episode = await run_episode(
                spec,
                self.model,
                self.tools,
                question,
                prompt_ids=prompt,
                sampling=SamplingParams(self.model.context_tokens, temperature=self.temperature),
                seed=self.seed,
                on_event=view.show if view else None,
            )
        finally:
            if view:
                view.end()
        record = episode_record(
            episode,
            spec,
            id=self.conversation.next_id(),
            question=question,
            model=self.model.name,
            seed=self.seed,
            provenance={"turn": len(self.conversation.turns) + 1},
        )
        self.conversation.add(record)
        if view:
            view.summarise(episode)
        else:
            print(record.model_dump_json(ensure_ascii=True), flush=True)
        return record


def chat(asker: ChatSession, run: Callable[[Any], Any]) -> None:
    """Answer each question in turn. An error in one turn does not end the others.

    Args:
        run: Runs a coroutine to its end; an interrupt cancels the coroutine and is raised.

    Raises:
        AfmError: A question that did not come from a terminal could not be answered.
    """
    live = sys.stdin.isatty()
    if live:
        turns = len(asker.conversation.turns)
        count = f", {plural(turns, 'turn')} so far" if turns else ""
        print(f"{asker.conversation.spec.name} with {asker.model.name}{count}. {_HELP}", file=sys.stderr)
    for question in _questions(live):
        if live and question.startswith("/"):
            if question == "/quit":
                return
            if question == "/new":
                asker.conversation.turns.clear()
            print("forgotten" if question == "/new" else _HELP, file=sys.stderr)
            continue
        try:
            run(asker.ask(question))
        except (KeyboardInterrupt, asyncio.CancelledError):
            if not live:
                raise
            print("stopped; the question and its unfinished answer are not kept", file=sys.stderr)
        except AfmError as error:
            if not live:
                raise
            print(f"error: {error}", file=sys.stderr)


def _questions(live: bool) -> Iterator[str]:
    """Yield the lines of the terminal or of standard input, without empty ones."""
    if not live:
        yield from filter(None, map(str.strip, sys.stdin))
        return
    import readline  # noqa: F401 - gives input() its keys and its history

    while True:
        try:
            line = input(_PROMPT).strip()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\nCtrl-D ends", file=sys.stderr)
            continue
        if line:
            yield line


_SHOWN_LINES = 12
"""Lines of an observation on the screen. --save writes all of it."""
_SHOWN_ARGUMENT = 48


class EpisodeView:
    """Shows events: on a terminal with role names instead of tags, elsewhere as exact text. Costs need ``prices``."""

    def __init__(self, spec: AgentSpec, console: Console, prices: Prices | None = None) -> None:
        self._prices = prices
        self._spec = spec
        own = [role for role in spec.roles if role != spec.observation_role]
        self._styles = dict(
            zip(own, cycle(ROLE_STYLES), strict=False)
        )  # in the order of the viewer's colours
        self._styles[spec.answer_role] += " bold"
        self._console = console
        self._status: Status | None = None
        self._line_is_open = False
        self._role: str | None = None

    def begin(self) -> None:
        """Show that the model reads the question."""
        self._spin("the model is reading")

    def show(self, event: EpisodeEvent) -> None:
        """Show one event."""
        match event:
            case TextWritten():
                self._still()
                if self._console.is_terminal:
                    self._piece(event)
                else:
                    self._console.print(Text(visible(event.text)), end="")
            case CallStarted():
                argument = " ".join(visible(event.argument).split())
                short = argument[:_SHOWN_ARGUMENT] + ("..." if len(argument) > _SHOWN_ARGUMENT else "")
                self._spin(f"{event.tool}: {short}")
            case CallFinished():
                self._still()
                if self._console.is_terminal:
                    self._show_call(event)
                self._spin("the model is reading")
            case Stopped():
                self.end()

    def end(self) -> None:
        """Restore the terminal at the end of the episode."""
        self._still()
        self._fresh_line()
        self._role = None

    def summarise(self, episode: Episode) -> None:
        """Show the answer, the reason of the end, and the cost."""
        cost = episode.cost
        answer = " | ".join(answers(episode.segments, self._spec))
        self._console.print()
        line = f"answer: {' '.join(visible(answer).split()) or 'none'} (stopped: {episode.stop})"
        self._console.print(Text(line, "bold"))
        speed = cost.agent_tokens / cost.generation_seconds if cost.generation_seconds else 0.0
        line = (
            f"cost: {cost.agent_tokens} tokens written and {cost.observation_tokens} observed after a prompt of "
            f"{cost.prompt_tokens}, tool calls: {cost.tool_calls} ({cost.tool_failures} failed), "
            f"{cost.wall_seconds:.1f} s, {speed:.0f} tokens/s"
        )
        if self._prices is not None:
            from afm.evaluation.wording import dollars

            usd = self._prices.model_usd(cost) + self._prices.tools_usd(episode.calls)
            line += f", {dollars(usd)}"
        self._console.print(Text(line, "dim"))

    def _piece(self, event: TextWritten) -> None:
        if not event.by_agent:
            self._observation(event)
        elif event.role is None:
            self._text(event.text if event.text.strip() else "", "")
        elif event.text == f"<{event.role}>" and self._role is None:
            self._name(event.role)
        elif event.text == f"</{event.role}>" and self._role == event.role:
            self._fresh_line()
            self._role = None
        elif self._role == event.role:
            # The line break after a tag is not part of the text.
            self._text(event.text if self._line_is_open else event.text.lstrip("\n"), self._style(event.role))

    def _observation(self, event: TextWritten) -> None:
        role = event.role or ""
        lines = event.text.strip().removeprefix(f"<{role}>").removesuffix(f"</{role}>").strip().split("\n")
        self._name(role)
        for line in lines[:_SHOWN_LINES]:
            self._console.print(Text(f"  {visible(line)}", self._style(role)))
        if len(lines) > _SHOWN_LINES:
            self._console.print(Text(f"  ... {len(lines) - _SHOWN_LINES} more lines", "dim italic"))
        self._role = None

    def _name(self, role: str) -> None:
        self._fresh_line()
        self._console.print(Text(role, f"reverse {self._style(role)}".replace("dim", "bright_black")))
        self._role = role

    def _show_call(self, event: CallFinished) -> None:
        self._fresh_line()
        call = event.call
        state = "repeated" if call.duplicate else "done" if call.ok else "failed"
        style = terminal_style("bad" if state == "failed" else "soft")
        self._console.print(Text(f"{call.tool} {state} after {call.seconds:.1f} s", f"italic {style}"))

    def _text(self, text: str, style: str) -> None:
        if text:
            self._console.print(Text(visible(text), style), end="")
            self._line_is_open = not text.endswith("\n")

    def _fresh_line(self) -> None:
        if self._line_is_open:
            self._console.print()
        self._line_is_open = False

    def _style(self, role: str) -> str:
        return self._styles.get(role, terminal_style("soft")) if role in self._spec.roles else ""

    def _spin(self, what: str) -> None:
        """Animate a line until :meth:`_still`. Print nothing outside a terminal."""
        self._still()
        if self._console.is_terminal:
            self._fresh_line()
            spinner = "line" if self._console.options.ascii_only else "dots"
            self._status = self._console.status(Text(what, "dim italic"), spinner=spinner)
            self._status.start()

    def _still(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
