r"""ReTool's cold-start trajectories: ``{messages: [{role, content}]}``, as in JoeYing/ReTool-SFT.

One assistant turn holds thoughts, programs in ``<code>`` and what they printed in ``<interpreter>``. It is cut there, so
that what the interpreter wrote becomes a turn of the role ``tool``, on which nothing is trained.

``retool_questions`` takes the problems alone, with the number in the last ``\boxed{}`` as gold answer: to be worked on by
another agent. Around a problem stand an instruction and a reminder of ReTool's own answer format, which are taken away.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from afm.datasets.readers.row import Conversation, Message, Reader, identity, listed, mapping, text
from afm.datasets.schema import Task
from afm.errors import DataError

_PRINTED = re.compile(r"<interpreter>(.*?)</interpreter>", re.DOTALL)
_ASKED = "*user question:*"
_REMINDER = "Remember to place the final answer"
_BOX = "\\boxed{"
_ROLES = frozenset({"system", "user", "assistant"})


def _read(row: Mapping[str, Any], default: str) -> Conversation:
    turns = [mapping(turn, "messages") for turn in listed(row.get("messages"))]
    messages = [message for turn in turns for message in _messages(turn)]
    if [message.role for message in messages if message.role != "system"][:2] != ["user", "assistant"]:
        raise DataError(
            f"`messages`: expected a user turn and the reply, got {[m.role for m in messages][:4]}"
        )
    return Conversation(id=identity(row, default, "id"), messages=tuple(messages), data_source="retool")


def _messages(turn: Mapping[str, Any]) -> Iterator[Message]:
    role, content = turn.get("role"), text(turn, "content")
    if role not in _ROLES:
        raise DataError(f"`messages`: role {role!r}, expected one of {sorted(_ROLES)}")
    if role != "assistant":
        yield Message(role=role, content=content, loss=False)
        return
    position = 0
    for printed in _PRINTED.finditer(content):
        if written := content[position : printed.start()].strip():
            yield Message(role="assistant", content=written, loss=True)
        yield Message(role="tool", content=printed[1].strip(), loss=False)
        position = printed.end()
    rest = content[position:].strip()
    if re.search(r"</?interpreter>", rest):
        raise DataError("an <interpreter> block is never closed, or never opened")
    if rest:
        yield Message(role="assistant", content=rest, loss=True)


def _question(row: Mapping[str, Any], default: str) -> Task:
    conversation = _read(row, default)
    asked, *written = (
        message.content for message in conversation.messages if message.role in ("user", "assistant")
    )
    answer = boxed(written[-1])
    if not answer:
        raise DataError("the last reply has no \\boxed{} answer")
    return Task(id=conversation.id, question=_problem(asked), ground_truth=answer, data_source="retool")


def _problem(asked: str) -> str:
    body = asked.rpartition(_ASKED)[2].strip()
    lead, blank, rest = body.partition("\n")
    body = rest if blank and "\\boxed" in lead else body
    return body.partition(_REMINDER)[0].strip() or asked.strip()


def boxed(text: str) -> str:
    r"""What the last ``\boxed{..}`` of a text holds, braces within it included; empty when there is none."""
    begin = text.rfind(_BOX)
    depth = 1
    for place in range(begin + len(_BOX), len(text) if begin >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin + len(_BOX) : place].strip()
    return ""


RETOOL_QUESTIONS = Reader("retool_questions", "retool", _question)
RETOOL = Reader("retool", "retool", _read, makes_conversations=True)
