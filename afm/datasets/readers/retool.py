"""ReTool's cold-start trajectories: ``{messages: [{role, content}]}``, as in JoeYing/ReTool-SFT.

One assistant turn holds thoughts, programs in ``<code>`` and what they printed in ``<interpreter>``. It is cut there, so
that what the interpreter wrote becomes a turn of the role ``tool``, on which nothing is trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from afm.datasets.readers.row import Conversation, Message, Reader, identity, listed, mapping, text
from afm.errors import DataError

_PRINTED = re.compile(r"<interpreter>(.*?)</interpreter>", re.DOTALL)
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


RETOOL = Reader("retool", "retool", _read, makes_conversations=True)
