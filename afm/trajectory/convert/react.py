"""ReAct traces (arXiv 2210.03629): ``Thought:``, ``Action:``, ``Action Input:``, ``Observation:``, ``Final Answer:``.

Rows are ``{question, text}``. Roles of an agent other than thought, tool and answer are written as thoughts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from afm.agents import AgentSpec
from afm.errors import DataError
from afm.trajectory.chat import row_id, text_of
from afm.trajectory.convert.base import KEY, Context, DialogueFormat
from afm.trajectory.convert.dialogue import Dialogue, Turn, Use
from afm.trajectory.record import Record
from afm.trajectory.tags import split

_WORD = re.compile(
    r"^[ \t]*\**(Thought|Action Input|Action|Observation|Final Answer)(?:[ \t]*\d+)?\**[ \t]*:\**[ \t]?",
    re.MULTILINE,
)
_BRACKETS = re.compile(r"(?s)\A\s*([\w .-]{1,80})\[(.*)\]\s*\Z")
FINISH = "Finish"
"""What ends a run with its answer: in ReAct and, as a function, in ToolBench."""


class React(DialogueFormat):
    """``Action: tool`` with ``Action Input:``, or ``Action: tool[input]``; ``Finish[x]`` answers."""

    name: ClassVar[str] = "react"
    loses: ClassVar[str] = (
        "roles (all but tools and answer become thoughts), id, gold answer, verdict, cost and provenance"
    )

    def known(self, row: Any) -> bool:
        """See :class:`Format`."""
        return isinstance(row, dict) and isinstance(row.get("text"), str) and "question" in row

    def parse(self, row: Any) -> Dialogue:
        """See :class:`DialogueFormat`."""
        if not isinstance(row, dict):
            raise DataError(f"got {type(row).__name__}, expected an object with question and text")
        turns = react_turns(text_of(row, "text"))
        if not turns:
            raise DataError("text: holds no Thought:, Action: or Final Answer:")
        return Dialogue(text_of(row, "question"), turns, {"id": row_id(row)})

    def show(self, dialogue: Dialogue, record: Record, context: Context, kept: Mapping[str, Any]) -> Any:
        """See :class:`DialogueFormat`."""
        spec = context.spec(record.agent)
        lines = []
        for turn in dialogue.turns:
            thoughts, answer = _plain(turn.text, spec)
            lines += [f"Thought: {thoughts}"] if thoughts else []
            for use in turn.uses:
                lines += [f"Action: {use.tool}", f"Action Input: {use.text()}", f"Observation: {use.result}"]
            lines += [f"Final Answer: {answer}"] if answer is not None else []
        row = {"question": record.question, "text": "\n".join(lines)}
        return {**row, KEY: dict(kept)} if kept else row


def react_turns(text: str) -> tuple[Turn, ...]:
    """The turns of a trace, empty when it is none."""
    turns: list[Turn] = []
    open_turn, action = Turn(), ""
    for word, content in _parts(text):
        if word == "Thought":
            if open_turn.uses:
                turns.append(open_turn)
                open_turn = Turn()
            open_turn = replace(open_turn, text=f"{open_turn.text}\n\n{content}".strip())
        elif word == "Action":
            if open_turn.uses:
                turns.append(open_turn)
                open_turn = Turn()
            action = content
            if brackets := _BRACKETS.match(content):
                if brackets[1].strip().lower() == FINISH.lower():
                    turns += _ended(open_turn, brackets[2])
                    open_turn = Turn()
                else:
                    open_turn = replace(open_turn, uses=(Use(brackets[1].strip(), brackets[2]),))
        elif word == "Action Input":
            if action == FINISH:
                turns += _ended(open_turn, finished(_argument(content)))
                open_turn = Turn()
            else:
                open_turn = replace(open_turn, uses=(Use(action, _argument(content)),))
        elif word == "Observation" and open_turn.uses:
            use = replace(open_turn.uses[-1], result=content)
            turns.append(replace(open_turn, uses=(use,)))
            open_turn = Turn()
        elif word == "Final Answer":
            turns += _ended(open_turn, content)
            open_turn = Turn()
    return (*turns, *((open_turn,) if open_turn.text or open_turn.uses else ()))


def _parts(text: str) -> list[tuple[str, str]]:
    marks = list(_WORD.finditer(text))
    if not marks:
        return []
    if text[: marks[0].start()].strip():
        return [("Thought", text[: marks[0].start()].strip()), *_parts(text[marks[0].start() :])]
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return [(mark[1], text[mark.end() : end].strip()) for mark, end in zip(marks, ends, strict=True)]


def finished(arguments: Any) -> str:
    """The answer in the arguments of :data:`FINISH`, ToolBench's ``{return_type, final_answer}`` or its text.

    Raises:
        DataError: It ends the run without an answer.
    """
    answer = arguments.get("final_answer") if isinstance(arguments, Mapping) else arguments
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(f"{FINISH}: got {str(arguments)[:80]}, expected a final_answer; the run gave up")
    return answer


def _ended(turn: Turn, answer: str) -> list[Turn]:
    return [*([turn] if turn.text else []), Turn(answer, final=True)]


def _argument(text: str) -> Any:
    """Parameters where the input is a JSON object, else the text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


def _plain(text: str, spec: AgentSpec) -> tuple[str, str | None]:
    """What stands in the roles of a turn as one thought, and the answer if there is one."""
    steps = split(text, spec).steps
    if not steps:
        return text.strip(), None
    thoughts = [step.content.strip() for step in steps if step.role != spec.answer_role]
    answers = [step.content.strip() for step in steps if step.role == spec.answer_role]
    return "\n\n".join(thoughts), answers[-1] if answers else None
