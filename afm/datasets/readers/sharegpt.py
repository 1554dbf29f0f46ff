"""ShareGPT: ``{id, conversations: [{from: human | gpt | system, value}]}``, as in ShareGPT_V3_unfiltered_cleaned_split.json."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import dropwhile, pairwise
from typing import Any

from afm.datasets.readers.row import Conversation, Message, Reader, identity, listed, mapping, shown, text
from afm.errors import DataError

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
}


def _read(row: Mapping[str, Any], default: str) -> Conversation:
    """Long chats are published in pieces, so one may begin with an answer or end with a question: neither is kept."""
    turns = [_message(mapping(turn, "conversations")) for turn in listed(row.get("conversations"))]
    system = [turn for turn in turns[:1] if turn.role == "system"]
    spoken = list(dropwhile(lambda turn: turn.role != "user", turns[len(system) :]))
    if spoken and spoken[-1].role == "user":
        spoken = spoken[:-1]
    if not spoken:
        raise DataError("`conversations`: no question with an answer")
    for first, second in pairwise(spoken):
        if first.role == second.role or second.role == "system":
            raise DataError(f"`conversations`: a turn of the {second.role} after one of the {first.role}")
    return Conversation(
        id=identity(row, default, "id"), messages=tuple(system + spoken), data_source="sharegpt"
    )


def _message(turn: Mapping[str, Any]) -> Message:
    role = _ROLES.get(str(turn.get("from")))
    if role is None:
        raise DataError(f"`conversations`: from {shown(turn.get('from'))}, expected one of {sorted(_ROLES)}")
    text(turn, "value")
    return Message(role=role, content=turn["value"], loss=role == "assistant")


SHAREGPT = Reader("sharegpt", "sharegpt", _read, makes_conversations=True)
