"""Agent-FLAN rows (arXiv 2403.12881): ``{id, conversation: [{role, content, loss}]}``."""

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


class AgentFlan(DialogueFormat):
    """Calls stand in the assistant's text (ReAct, or the agent's tags), results in the user's next turn."""

    name: ClassVar[str] = "agent_flan"
    loses: ClassVar[str] = "gold answer, verdict, cost and provenance"

    def known(self, row: Any) -> bool:
        """See :class:`Format`."""
        return isinstance(row, dict) and isinstance(row.get("conversation"), list)

    def parse(self, row: Any) -> Dialogue:
        """See :class:`DialogueFormat`."""
        if not isinstance(row, dict):
            raise DataError(f"got {type(row).__name__}, expected an object with conversation")
        messages = message_list(row, "conversation")
        found = walked(messages, "conversation")
        spoken = [message for message in messages if message["role"] == "assistant"]
        unlearnt = sum(message.get("loss") is False for message in spoken)
        lost = (f"that {unlearnt} of its turns are not trained on",) if unlearnt else ()
        return replace(found, facts={"id": row_id(row)}, lost=found.lost + lost)

    def show(self, dialogue: Dialogue, record: Record, context: Context, kept: Mapping[str, Any]) -> Any:
        """See :class:`DialogueFormat`."""
        spec = context.spec(record.agent)
        turns: list[dict[str, Any]] = [{"role": "user", "content": dialogue.question, "loss": False}]
        for turn in dialogue.turns:
            turns.append({"role": "assistant", "content": with_call(turn, spec), "loss": True})
            turns += [{"role": "user", "content": use.result or "", "loss": False} for use in turn.uses]
        row: dict[str, Any] = {"id": record.id, "conversation": turns}
        return {**row, KEY: dict(kept)} if kept else row
