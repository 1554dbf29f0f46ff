"""Agent-FLAN: ``{id, conversation: [{role, content, loss}]}``, as in internlm/Agent-FLAN (arXiv 2403.12881)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Conversation, Message, Reader, identity, listed, mapping, shown, text
from afm.errors import DataError

_ROLES = frozenset({"system", "user", "assistant"})


def _read(row: Mapping[str, Any], default: str) -> Conversation:
    turns = [mapping(turn, "conversation") for turn in listed(row.get("conversation"))]
    if not any(turn.get("loss") for turn in turns):
        raise DataError("`conversation`: no turn has loss = true, so nothing could be learned from it")
    messages = tuple(_message(turn) for turn in turns)
    return Conversation(id=identity(row, default, "id"), messages=messages, data_source="agent_flan")


def _message(turn: Mapping[str, Any]) -> Message:
    role, loss = turn.get("role"), turn.get("loss")
    if role not in _ROLES:
        raise DataError(f"`conversation`: role {role!r}, expected one of {sorted(_ROLES)}")
    if not isinstance(loss, bool):
        raise DataError(f"`conversation`: loss {shown(loss)}, expected true or false")
    text(turn, "content")  # checked, and then taken with the blanks around it, which are trained on too
    return Message(role=role, content=turn["content"], loss=loss)


AGENT_FLAN = Reader("agent_flan", "agent_flan", _read, makes_conversations=True)
