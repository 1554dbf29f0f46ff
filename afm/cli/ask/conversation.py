"""What was asked and answered before, as a model reads it again and as a file keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from afm.agents import PromptSource
from afm.errors import UsageError

if TYPE_CHECKING:
    from afm.agents import AgentSpec
    from afm.models import TokenModel
    from afm.trajectory.record import Record


@dataclass(slots=True)
class Conversation:
    """The finished turns with one agent.

    Attributes:
        turns: One record each, oldest first.
        file: JSONL that every further turn is appended to.
        source: Where the prompt of the first turn comes from.
    """

    spec: AgentSpec
    turns: list[Record] = field(default_factory=list)
    file: Path | None = None
    source: PromptSource = field(default_factory=PromptSource)

    def prompt(self, model: TokenModel, question: str) -> tuple[list[int], int]:
        """Token ids of the earlier turns and the question, and how many of the oldest turns were left out.

        Turns are left out until half of the model's context is free for the answer; the first turn that is
        kept carries the agent's instruction.
        """
        for left_out in range(len(self.turns) + 1):
            ids = model.encode_prompt(self._messages(self.turns[left_out:], question))
            if len(ids) <= model.context_tokens // 2:
                break
        return ids, left_out

    def add(self, record: Record) -> None:
        """Keep a finished turn, in the file too."""
        from afm.trajectory.io import RecordWriter

        self.turns.append(record)
        if self.file is not None:
            with RecordWriter(self.file) as writer:
                writer.write(record)

    def next_id(self) -> str:
        """Id of the turn that comes next."""
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
) -> Conversation:
    """The conversation that the options name.

    Args:
        save: File that is written; it must not exist.
        resume: File whose turns come first; they go on there unless ``save`` names another.
        source: Where the prompt comes from; by default the agent.

    Raises:
        UsageError: ``save`` exists, ``resume`` does not, is empty or was held with another agent.
        DataError: A line of ``resume`` is broken.
    """
    from afm.trajectory.io import RecordWriter, load_records

    if save is not None and save.exists():
        raise UsageError(
            f"--save {save}: exists already; choose another file, or go on with --continue {save}"
        )
    turns: list[Record] = []
    if resume is not None:
        if not resume.is_file():
            raise UsageError(f"--continue {resume}: no such file; expected one that --save wrote")
        turns = load_records(resume)
        if not turns:
            raise UsageError(
                f"--continue {resume}: is empty, there is no turn to go on from; remove it and begin with --save {resume}"
            )
        others = sorted({turn.agent for turn in turns if turn.agent_digest != spec.digest})
        if others:
            raise UsageError(
                f"--continue {resume}: held with agent {', '.join(others)} of another declaration than {spec.name!r} "
                "now; choose that agent with --agent, or begin anew with --save"
            )
    if save is not None and turns:
        with RecordWriter(save) as writer:
            for turn in turns:
                writer.write(turn)
    return Conversation(spec, turns, save or resume, source or PromptSource())
