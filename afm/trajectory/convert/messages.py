"""Formats that are lists of chat messages: OpenAI rows, bare lists, ShareGPT and Agent-FLAN (arXiv 2403.12881)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from afm.errors import DataError
from afm.trajectory.chat import called_function, content_text, hidden_reasoning, message_list, row_id
from afm.trajectory.convert.base import KEY, Context, DialogueFormat
from afm.trajectory.convert.dialogue import ARGUMENT, Dialogue, Turn, Use, second_question, with_call
from afm.trajectory.convert.react import FINISH, finished, react_turns
from afm.trajectory.record import Record

_OBSERVATION = re.compile(r"\A\s*\**Observation(?:[ \t]*\d+)?\**[ \t]*:[ \t]?\n?")
_ACTION = re.compile(r"^[ \t]*\**(?:Action(?:[ \t]*\d+)?\**[ \t]*:|Final Answer\**[ \t]*:)", re.MULTILINE)


class OpenAi(DialogueFormat):
    """``{messages, tools}`` with ``tool_calls`` and messages of the role ``tool``."""

    name: ClassVar[str] = "openai"
    loses: ClassVar[str] = "id, gold answer, verdict, cost and provenance"

    def known(self, row: Any) -> bool:
        """See :class:`Format`."""
        return isinstance(row, dict) and isinstance(row.get("messages"), list)

    def parse(self, row: Any) -> Dialogue:
        """See :class:`DialogueFormat`."""
        if not isinstance(row, dict):
            raise DataError(f"got {type(row).__name__}, expected an object with messages")
        found = walked(message_list(row, "messages", content_key=None), "messages")
        known = {"messages", "tools", "id", "parallel_tool_calls", KEY}
        lost = tuple(f"key {key!r}" for key, value in row.items() if key not in known and value)
        return replace(found, facts={"id": row_id(row)}, lost=found.lost + lost)

    def show(self, dialogue: Dialogue, record: Record, context: Context, kept: Mapping[str, Any]) -> Any:
        """See :class:`DialogueFormat`."""
        messages = list(shown(dialogue))
        names = dict.fromkeys(use.tool for turn in dialogue.turns for use in turn.uses)
        row: dict[str, Any] = {"messages": messages}
        if names:
            row["tools"] = [declared(name) for name in names]
        return {**row, KEY: dict(kept)} if kept else row


class Messages(DialogueFormat):
    """A bare list of messages."""

    name: ClassVar[str] = "messages"
    keeps: ClassVar[bool] = False
    loses: ClassVar[str] = "id, gold answer, verdict, cost and provenance"

    def known(self, row: Any) -> bool:
        """See :class:`Format`."""
        return (
            isinstance(row, list)
            and bool(row)
            and all(isinstance(part, dict) and "role" in part for part in row)
        )

    def parse(self, row: Any) -> Dialogue:
        """See :class:`DialogueFormat`."""
        return walked(message_list({"messages": row}, "messages", content_key=None), "messages")

    def show(self, dialogue: Dialogue, record: Record, context: Context, kept: Mapping[str, Any]) -> Any:
        """See :class:`DialogueFormat`."""
        return list(shown(dialogue))


def declared(name: str) -> dict[str, Any]:
    """A tool as OpenAI's clients declare it, with one parameter."""
    schema = {"type": "object", "properties": {ARGUMENT: {"type": "string"}}, "required": [ARGUMENT]}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


def shown(dialogue: Dialogue) -> Iterator[dict[str, Any]]:
    """A conversation as messages."""
    import json

    yield {"role": "user", "content": dialogue.question}
    number = 0
    for turn in dialogue.turns:
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        calls = []
        for use in turn.uses:
            number += 1
            arguments = json.dumps({ARGUMENT: use.text()}, ensure_ascii=False)
            function = {"name": use.tool, "arguments": arguments}
            calls.append({"id": f"call_{number}", "type": "function", "function": function})
        yield {**message, "tool_calls": calls} if calls else message
        for call, use in zip(calls, turn.uses, strict=True):
            yield {"role": "tool", "tool_call_id": call["id"], "content": use.result or ""}


def walked(messages: Sequence[Mapping[str, Any]], column: str) -> Dialogue:
    """The conversation in a list of messages of system, user, assistant and tool.

    What the user says behind a call that has no result yet is its result (``Observation:`` in front of it is dropped).

    Raises:
        DataError: A message cannot stand where it does; names it.
    """
    walk = _Walk()
    for number, message in enumerate(messages):
        try:
            walk.take(message)
        except DataError as error:
            raise DataError(f"{column}[{number}]: {error.message}") from None
    if walk.question is None or not walk.turns:
        raise DataError(f"{column}: expected a question and at least one message of the assistant")
    return Dialogue(walk.question, tuple(walk.turns), lost=tuple(dict.fromkeys(walk.lost)))


class _Walk:
    """What is known of a conversation so far."""

    def __init__(self) -> None:
        self.question: str | None = None
        self.turns: list[Turn] = []
        self.lost: list[str] = []
        self._ids: list[str] = []

    def take(self, message: Mapping[str, Any]) -> None:
        role = message["role"]
        if role in ("system", "developer"):
            if self.turns:
                raise DataError(f"a {role} message behind the assistant's first")
            self.lost += ["the system prompt"] if content_text(message) else []
        elif role == "user":
            self._user(content_text(message))
        elif role == "assistant":
            self._assistant(message)
        elif role in ("tool", "function"):
            if not (self.turns and self.turns[-1].final):  # what calling the end of the run gave
                name = str(message.get("name") or "") if role == "function" else ""
                self._result(content_text(message), str(message.get("tool_call_id") or ""), name)
        else:
            raise DataError(f"role: got {role!r}, expected system, user, assistant or tool")

    def _user(self, text: str) -> None:
        if not self.turns:
            self.question = text if self.question is None else f"{self.question}\n\n{text}"
        elif self._open() is not None:
            self._result(_OBSERVATION.sub("", text, count=1), "")
        elif self.turns[-1].uses:
            raise second_question(text)
        else:  # the call stands in the assistant's text, in the tags of its agent
            use = Use("", "", _OBSERVATION.sub("", text, count=1))
            self.turns[-1] = replace(self.turns[-1], uses=(use,))

    def _assistant(self, message: Mapping[str, Any]) -> None:
        if self.question is None:
            raise DataError("the assistant speaks before a question")
        text = content_text(message) if message.get("content") else ""
        hidden = hidden_reasoning(message)
        hidden = "" if hidden in text else hidden
        listed = message.get("tool_calls")
        calls = listed if isinstance(listed, list) else []
        if not calls and message.get("function_call"):  # the older form of one call
            calls = [{"function": message["function_call"]}]
        if not calls and _ACTION.search(text):
            self.turns += [*([Turn(thought=hidden)] if hidden else []), *react_turns(text)]
            self._ids = [""]
            return
        found = [called_function(call) for call in calls]
        if len(found) == 1 and found[0]["name"] == FINISH:
            said = "\n\n".join(part for part in (hidden, text.strip()) if part)
            answer = finished(found[0]["arguments"])
            self.turns += [*([Turn(thought=said)] if said else []), Turn(answer, final=True)]
            return
        self._ids = [str(call.get("id") or "") for call in calls]
        uses = tuple(Use(call["name"], call["arguments"]) for call in found)
        self.turns.append(Turn(text, uses, thought=hidden))

    def _open(self, identity: str = "", name: str = "") -> int | None:
        """The first call of the last turn that has no result yet, of those with that identity or name if one is given."""
        uses = self.turns[-1].uses if self.turns else ()
        fitting = [place for place, use in enumerate(uses) if use.result is None and name in ("", use.tool)]
        if identity:
            # A call without an identity may be anybody's; text of the agent has none.
            fitting = [place for place in fitting if self._ids[place] == identity] or [
                place for place in fitting if not self._ids[place]
            ]
        return fitting[0] if fitting else None

    def _result(self, text: str, identity: str, name: str = "") -> None:
        place = self._open(identity, name)
        if place is None and name and self.turns and self.turns[-1].uses:
            called = ", ".join(use.tool for use in self.turns[-1].uses)
            raise DataError(
                f"name: got {name!r}, expected that of a call before it without a result: {called}"
            )
        if place is None and identity and self.turns and self.turns[-1].uses:
            raise DataError(
                f"tool_call_id: got {identity!r}, expected that of a call before it without a result; "
                f"the last calls are {', '.join(map(repr, self._ids))}"
            )
        if place is None:
            raise DataError("a result of a tool without a call before it")
        uses = list(self.turns[-1].uses)
        uses[place] = replace(uses[place], result=text)
        self.turns[-1] = replace(self.turns[-1], uses=tuple(uses))


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
        messages = [_openai_message(turn, number) for number, turn in enumerate(turns)]
        found = walked(_with_words(messages), "conversations")
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


def _openai_message(turn: Mapping[str, Any], number: int) -> dict[str, Any]:
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


def _with_words(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A turn of gpt directly before a call of its own becomes the words beside it."""
    found: list[dict[str, Any]] = []
    for message in messages:
        before = found[-1] if found else {}
        if message.get("tool_calls") and before.get("role") == "assistant" and not before.get("tool_calls"):
            message = {**message, "content": before["content"]}
            found.pop()
        found.append(message)
    return found


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
