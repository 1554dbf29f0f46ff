"""Question after question with one loaded model; Ctrl-C ends an answer and not the conversation."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from afm.cli.ask.conversation import Conversation
from afm.errors import AfmError

if TYPE_CHECKING:
    from rich.console import Console

    from afm.evaluation.prices import Prices
    from afm.models import TokenModel
    from afm.tools import Tool
    from afm.trajectory.record import Record

_HELP = "/new forgets what was said, /help shows this, /quit or Ctrl-D ends; Ctrl-C stops an answer."
_PROMPT = "you> "


@dataclass(frozen=True, slots=True)
class Asker:
    """A model, its tools and how to sample.

    Attributes:
        console: ``None`` when records are printed and nothing else.
        prices: For the line of costs.
    """

    model: TokenModel
    tools: Mapping[str, Tool]
    conversation: Conversation
    temperature: float
    seed: int | None
    console: Console | None
    prices: Prices | None = None

    async def ask(self, question: str) -> Record:
        """One turn, shown live or as a line of JSON, kept in the conversation.

        Raises:
            EngineError: The model failed.
        """
        from afm.models import SamplingParams
        from afm.rollout import episode_record, run_episode

        spec = self.conversation.spec
        view = None
        if self.console is not None:
            from afm.cli.ask.view import EpisodeView

            view = EpisodeView(spec, self.console, self.prices)
        prompt, left_out = self.conversation.prompt(self.model, question)
        if left_out:
            print(f"the {left_out} oldest turns no longer fit and were left out", file=sys.stderr)
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


def chat(asker: Asker, run: Callable[[Any], Any]) -> None:
    """Answer every question until there is none; an error of one turn does not end the others.

    Args:
        run: Runs a coroutine to its end; an interrupt cancels the coroutine and is raised.

    Raises:
        AfmError: Questions did not come from a terminal, and one could not be answered.
    """
    live = sys.stdin.isatty()
    if live:
        turns = len(asker.conversation.turns)
        told = f", {turns} turns so far" if turns else ""
        print(f"{asker.conversation.spec.name} with {asker.model.name}{told}. {_HELP}", file=sys.stderr)
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
            print("stopped; the question and what was written of an answer are forgotten", file=sys.stderr)
        except AfmError as error:
            if not live:
                raise
            print(f"error: {error}", file=sys.stderr)


def _questions(live: bool) -> Iterator[str]:
    """Lines of the terminal or of standard input, without empty ones."""
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
