"""An episode as it happens: roles in colour under their names, spinners while the model reads or a tool works."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from afm.agents import AgentSpec, RoleKind
from afm.rollout import CallFinished, CallStarted, Episode, EpisodeEvent, Stopped, TextWritten
from afm.trajectory import answers

if TYPE_CHECKING:
    from rich.status import Status

    from afm.evaluation.prices import Prices

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_STYLES = {
    RoleKind.THOUGHT: "dim",
    RoleKind.TEXT: "magenta",
    RoleKind.TOOL: "cyan",
    RoleKind.OBSERVATION: "green",
    RoleKind.ANSWER: "bold yellow",
}
_SHOWN_LINES = 12
"""Of an observation; the whole of it is in what --save writes."""
_SHOWN_ARGUMENT = 48


class EpisodeView:
    """Shows events: on a terminal with names for tags, elsewhere the text exactly as it was written.

    Args:
        console: Where it shows.
        prices: Of tokens and calls; without them no money is shown.
    """

    def __init__(self, spec: AgentSpec, console: Console, prices: Prices | None = None) -> None:
        self._prices = prices
        self._spec = spec
        self._console = console
        self._status: Status | None = None
        self._line_is_open = False
        self._role: str | None = None
        self._began = 0.0

    def begin(self) -> None:
        """The question is with the model."""
        self._began = time.monotonic()
        self._spin("the model is reading")

    def show(self, event: EpisodeEvent) -> None:
        """Show one event."""
        match event:
            case TextWritten():
                self._still()
                if self._console.is_terminal:
                    self._piece(event)
                else:
                    self._console.print(Text(_clean(event.text)), end="")
            case CallStarted():
                argument = " ".join(_clean(event.argument).split())
                short = argument[:_SHOWN_ARGUMENT] + ("..." if len(argument) > _SHOWN_ARGUMENT else "")
                self._spin(f"{event.tool}: {short}")
            case CallFinished():
                self._still()
                if self._console.is_terminal:
                    self._called(event)
                self._spin("the model is reading")
            case Stopped():
                self.end()

    def end(self) -> None:
        """Leave the terminal as it should be, whatever ended the episode."""
        self._still()
        self._fresh_line()
        self._role = None

    def summarise(self, episode: Episode) -> None:
        """The answer, why it ended, and what it cost."""
        cost = episode.cost
        found = " | ".join(answers(episode.segments, self._spec))
        self._console.print()
        told = f"answer: {_CONTROL.sub(' ', found) or 'none'} (stopped: {episode.stop})"
        self._console.print(Text(told, "bold"))
        speed = cost.agent_tokens / cost.generation_seconds if cost.generation_seconds else 0.0
        told = (
            f"cost: {cost.agent_tokens} tokens written and {cost.observation_tokens} observed after a prompt of "
            f"{cost.prompt_tokens}, tool calls: {cost.tool_calls} ({cost.tool_failures} failed), "
            f"{cost.wall_seconds:.1f} s, {speed:.0f} tokens/s"
        )
        if self._prices is not None:
            from afm.evaluation.words import dollars

            usd = self._prices.model_usd(cost) + self._prices.tools_usd(episode.calls)
            told += f", {dollars(usd)}"
        self._console.print(Text(told, "dim"))

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
            # The line break after a tag is no content.
            self._text(event.text if self._line_is_open else event.text.lstrip("\n"), self._style(event.role))

    def _observation(self, event: TextWritten) -> None:
        role = event.role or ""
        lines = event.text.strip().removeprefix(f"<{role}>").removesuffix(f"</{role}>").strip().split("\n")
        self._name(role)
        for line in lines[:_SHOWN_LINES]:
            self._console.print(Text(f"  {_clean(line)}", self._style(role)))
        if len(lines) > _SHOWN_LINES:
            self._console.print(Text(f"  ... {len(lines) - _SHOWN_LINES} more lines", "dim italic"))
        self._role = None

    def _name(self, role: str) -> None:
        self._fresh_line()
        self._console.print(Text(role, f"reverse {self._style(role)}".replace("dim", "bright_black")))
        self._role = role

    def _called(self, event: CallFinished) -> None:
        self._fresh_line()
        call = event.call
        state = "repeated" if call.duplicate else "done" if call.ok else "failed"
        style = "red" if state == "failed" else "dim"
        self._console.print(Text(f"{call.tool} {state} after {call.seconds:.1f} s", f"italic {style}"))

    def _text(self, text: str, style: str) -> None:
        if text:
            self._console.print(Text(_clean(text), style), end="")
            self._line_is_open = not text.endswith("\n")

    def _fresh_line(self) -> None:
        if self._line_is_open:
            self._console.print()
        self._line_is_open = False

    def _style(self, role: str) -> str:
        return _STYLES[self._spec.roles[role].kind] if role in self._spec.roles else ""

    def _spin(self, what: str) -> None:
        """A line that moves until :meth:`_still`; nothing outside a terminal."""
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


def _clean(text: str) -> str:
    return _CONTROL.sub("\ufffd", text)
