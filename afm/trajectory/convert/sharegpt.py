"""ShareGPT rows: ``{conversations: [{from, value}]}`` with human, gpt, function_call and observation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from afm.errors import DataError
from afm.trajectory.chat import message_list, row_id
from afm.trajectory.convert.base import Context, DialogueFormat
from afm.trajectory.convert.dialogue import Dialogue, with_call
from afm.trajectory.convert.messages import walked
from afm.trajectory.convert.sidecar import KEY
from afm.trajectory.record import Record

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function": "tool",
}


class ShareGpt(DialogueFormat):
    """Calls stand in the agent's own tags, since a ``function_call`` turn has no place for words."""

    name: ClassVar[str] = "sharegpt"
    loses: ClassVar[str] = "id, gold answer, verdict, cost and provenance"

    def known(self, row: Any) -> bool:
        """See :class:`Format`."""
        return isinstance(row, dict) and isinstance(row.get("conversations"), list)

    def parse(self, row: Any) -> Dialogue:
        """See :class:`DialogueFormat`."""
        if not isinstance(row, dict):
            raise DataError(f"got {type(row).__name__}, expected an object with conversations")
        turns = message_list(row, "conversations", "from", "value")
        messages = [_message(turn, number) for number, turn in enumerate(turns)]
        found = walked(_joined(messages), "conversations")
        lost: tuple[str, ...] = ("the system prompt",) if row.get("system") else ()
        known = {"conversations", "system", "tools", "id", KEY}
        lost += tuple(f"key {key!r}" for key, value in row.items() if key not in known and value)
        return replace(found, facts={"id": row_id(row)}, lost=found.lost + lost)

    def show(self, dialogue: Dialogue, record: Record, context: Context, kept: Mapping[str, Any]) -> Any:
        """See :class:`DialogueFormat`."""
        spec = context.spec(record.agent)
        turns = [{"from": "human", "value": dialogue.question}]
        for turn in dialogue.turns:
            turns.append({"from": "gpt", "value": with_call(turn, spec)})
            turns += [{"from": "observation", "value": use.result or ""} for use in turn.uses]
        row: dict[str, Any] = {"conversations": turns}
        return {**row, KEY: dict(kept)} if kept else row


def _message(turn: Mapping[str, Any], number: int) -> dict[str, Any]:
    import json

    kind, value = str(turn["from"]), turn["value"]
    if kind not in _ROLES:
        raise DataError(f"conversations[{number}].from: got {kind!r}, expected one of {', '.join(_ROLES)}")
    if kind != "function_call":
        role = "user" if _ROLES[kind] == "tool" else _ROLES[kind]
        return {"role": role, "content": value}
    try:
        calls = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"conversations[{number}]: a function_call that is no JSON: {error}") from None
    listed = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": "", "tool_calls": [{"function": call} for call in listed]}


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A turn of gpt directly before a call of its own becomes the words beside it."""
    found: list[dict[str, Any]] = []
    for message in messages:
        before = found[-1] if found else {}
        if message.get("tool_calls") and before.get("role") == "assistant" and not before.get("tool_calls"):
            message = {**message, "content": before["content"]}
            found.pop()
        found.append(message)
    return found
