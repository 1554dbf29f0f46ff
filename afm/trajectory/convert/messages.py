"""Formats of chat messages (OpenAI rows, bare lists, ShareGPT, Agent-FLAN of arXiv 2403.12881) and ReAct traces.

ReAct (arXiv 2210.03629) writes ``Thought:``, ``Action:``, ``Action Input:``, ``Observation:``, ``Final Answer:``. In
some chats the assistant's text has this form. Rows of ReAct are ``{question, text}``. All roles of an agent except
tools and the answer are written as thoughts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from afm.agents import AgentSpec
from afm.errors import DataError, json_word
from afm.trajectory import chat
from afm.trajectory.chat import called_function, content_text, hidden_reasoning, message_list, row_id, text_of
from afm.trajectory.convert.base import Context, DialogueFormat, lost_keys, row_object
from afm.trajectory.convert.dialogue import ARGUMENT, AgentTurn, Dialogue, Use, Walk, take_all, with_call
from afm.trajectory.record import Record
from afm.trajectory.tags import split

_OBSERVATION = re.compile(r"\A\s*\**Observation(?:[ \t]*\d+)?\**[ \t]*:[ \t]?\n?")
_ACTION = re.compile(r"^[ \t]*\**(?:Action(?:[ \t]*\d+)?\**[ \t]*:|Final Answer\**[ \t]*:)", re.MULTILINE)
_WORD = re.compile(
    r"^[ \t]*\**(Thought|Action Input|Action|Observation|Final Answer)(?:[ \t]*\d+)?\**[ \t]*:\**[ \t]?",
    re.MULTILINE,
)
_BRACKETS = re.compile(r"(?s)\A\s*([\w .-]{1,80})\[(.*)\]\s*\Z")
_FINISH = "Finish"
"""The word that ends a run with its answer in ReAct, and the function that does so in ToolBench."""


def declared(name: str) -> dict[str, Any]:
    """Return OpenAI's declaration of a tool with a single parameter."""
    schema = {"type": "object", "properties": {ARGUMENT: {"type": "string"}}, "required": [ARGUMENT]}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


def _messages(dialogue: Dialogue) -> Iterator[dict[str, Any]]:
    """Yield a conversation as messages."""
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


def _dialogue(messages: Sequence[Mapping[str, Any]], column: str) -> Dialogue:
    """Return the conversation in a list of messages of system, user, assistant and tool.

    A user message after a call without a result is the result, without a leading ``Observation:``.

    Raises:
        DataError: A message is not allowed at its place. The error names it.
    """
    walk = _MessageWalk()
    take_all(messages, walk.take, column + "[{}]")
    expected = f"{column}: expected a question and at least one message of the assistant"
    if not walk.turns:
        raise DataError(expected)
    return walk.dialogue(expected)


class _MessageWalk(Walk):
    """A list of messages while it is read."""

    def __init__(self) -> None:
        super().__init__()
        self._ids: list[str] = []

    def take(self, message: Mapping[str, Any]) -> None:
        role = message["role"]
        if role in ("system", "developer"):
            if self.turns:
                raise DataError(f"got a {role} message after the assistant's first, expected it before")
            self.lost += ["the system prompt"] if content_text(message) else []
        elif role == "user":
            self._user(content_text(message))
        elif role == "assistant":
            self._assistant(message)
        elif role in ("tool", "function"):
            if not (self.turns and self.turns[-1].final):  # otherwise it is the result of ending the run
                name = str(message.get("name") or "") if role == "function" else ""
                self._result(content_text(message), str(message.get("tool_call_id") or ""), name)
        else:
            raise DataError(chat.unknown_role(role))

    def _user(self, text: str) -> None:
        if not self.turns or (self._open() is None and self.turns[-1].uses):
            self.ask(text)
        elif self._open() is not None:
            self._result(_OBSERVATION.sub("", text, count=1), "")
        else:  # the call is in the assistant's text, in the tags of its agent
            use = Use("", "", _OBSERVATION.sub("", text, count=1))
            self.turns[-1] = replace(self.turns[-1], uses=(use,))

    def _assistant(self, message: Mapping[str, Any]) -> None:
        if self.question is None:
            raise DataError(chat.NO_QUESTION)
        text = content_text(message) if message.get("content") else ""
        hidden = hidden_reasoning(message)
        hidden = "" if hidden in text else hidden
        listed = message.get("tool_calls")
        calls = listed if isinstance(listed, list) else []
        if not calls and message.get("function_call"):  # the older form of one call
            calls = [{"function": message["function_call"]}]
        if not calls and _ACTION.search(text):
            self.turns += [*([AgentTurn(thought=hidden)] if hidden else []), *_react_turns(text)]
            self._ids = [""]
            return
        functions = [called_function(call) for call in calls]
        if len(functions) == 1 and functions[0]["name"] == _FINISH:
            said = "\n\n".join(part for part in (hidden, text.strip()) if part)
            answer = _final_answer(functions[0]["arguments"])
            self.turns += [*([AgentTurn(thought=said)] if said else []), AgentTurn(answer, final=True)]
            return
        self._ids = [str(call.get("id") or "") for call in calls]
        uses = tuple(Use(call["name"], call["arguments"]) for call in functions)
        self.turns.append(AgentTurn(text, uses, thought=hidden))

    def _open(self, identity: str = "", name: str = "") -> int | None:
        """Return the first call of the last turn without a result, with that identity or name if one is set."""
        uses = self.turns[-1].uses if self.turns else ()
        fitting = [place for place, use in enumerate(uses) if use.result is None and name in ("", use.tool)]
        if identity:
            # A call without an identity, such as one in the agent's text, matches any.
            fitting = [place for place in fitting if self._ids[place] == identity] or [
                place for place in fitting if not self._ids[place]
            ]
        return fitting[0] if fitting else None

    def _result(self, text: str, identity: str, name: str = "") -> None:
        place = self._open(identity, name)
        uses = self.turns[-1].uses if self.turns else ()
        expected = "expected that of an earlier call without a result"
        if place is None and name and uses:
            raise DataError(f"name: got {name!r}, {expected}: {', '.join(use.tool for use in uses)}")
        if place is None and identity and uses:
            calls = ", ".join(map(repr, self._ids))
            raise DataError(f"tool_call_id: got {identity!r}, {expected}; the last calls are {calls}")
        if place is None:
            raise DataError("got the result of a tool without a call before it")
        self.give(-1, place, text)


def _parse_openai(row: Any) -> Dialogue:
    row = row_object(row, "messages")
    dialogue = _listed(row.get("messages"))
    lost = dialogue.lost + lost_keys(row, ("messages", "tools", "id", "parallel_tool_calls"))
    return replace(dialogue, facts={"id": row_id(row)}, lost=lost)


def _show_openai(dialogue: Dialogue, record: Record, context: Context) -> dict[str, Any]:
    row: dict[str, Any] = {"messages": list(_messages(dialogue))}
    if names := dict.fromkeys(use.tool for turn in dialogue.turns for use in turn.uses):
        row["tools"] = [declared(name) for name in names]
    return row


OPENAI = DialogueFormat(
    "openai",
    lambda row: isinstance(row, dict) and isinstance(row.get("messages"), list),
    parse=_parse_openai,
    show=_show_openai,
)
"""``{messages, tools}`` with ``tool_calls`` and messages of the role ``tool``."""


def _parse_messages(row: Any) -> Dialogue:
    if not isinstance(row, list) or not row:
        got = json_word(row) if row != [] else "an empty list"
        raise DataError(f"got {got}, expected a list of messages, such as [{{role, content}}]")
    return _listed(row)


def _listed(messages: Any) -> Dialogue:
    """Return the conversation of chat messages, of LangChain's messages, or of items of the Responses API."""
    if isinstance(messages, list):
        messages = chat.chat_of_items(chat.chat_of_langchain(messages))
    return _dialogue(message_list({"messages": messages}, "messages", content_key=None), "messages")


MESSAGES = DialogueFormat(
    "messages",
    lambda row: isinstance(row, list) and row != [] and all(map(chat.is_message, row)),
    parse=_parse_messages,
    show=lambda dialogue, record, context: list(_messages(dialogue)),
    kept=None,
)
"""A bare list of messages, of LangChain's messages, or of items of the Responses API."""


_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user", "observation", "tool", "function"), "user"),
    **dict.fromkeys(("gpt", "assistant", "function_call"), "assistant"),
}
"""Maps roles of ShareGPT to roles of messages. Results are in turns of the user."""


def _parse_sharegpt(row: Any) -> Dialogue:
    row = row_object(row, "conversations")
    turns = message_list(row, "conversations", "from", "value")
    messages = [_openai_message(turn, number) for number, turn in enumerate(turns)]
    dialogue = _dialogue(_with_words(messages), "conversations")
    lost = (*dialogue.lost, *(("the system prompt",) if row.get("system") else ()))
    lost += lost_keys(row, ("conversations", "system", "tools", "id"))
    return replace(dialogue, facts={"id": row_id(row)}, lost=lost)


def _show_sharegpt(dialogue: Dialogue, record: Record, context: Context) -> dict[str, Any]:
    spec = context.spec(record.agent)
    turns = [{"from": "human", "value": dialogue.question}]
    for turn in dialogue.turns:
        turns.append({"from": "gpt", "value": with_call(turn, spec)})
        turns += [{"from": "observation", "value": use.result or ""} for use in turn.uses]
    return {"conversations": turns}


def _openai_message(turn: Mapping[str, Any], number: int) -> dict[str, Any]:
    kind, value = str(turn["from"]), turn["value"]
    if kind not in _ROLES:
        raise DataError(f"conversations[{number}].from: got {kind!r}, expected one of {', '.join(_ROLES)}")
    if kind != "function_call":
        return {"role": _ROLES[kind], "content": value}
    try:
        calls = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"conversations[{number}]: a function_call that is not JSON: {error}") from None
    listed = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": "", "tool_calls": [{"function": call} for call in listed]}


def _with_words(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join a turn of gpt with the call that directly follows it, as the text of that call's turn."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        before = joined[-1] if joined else {}
        if message.get("tool_calls") and before.get("role") == "assistant" and not before.get("tool_calls"):
            message = {**message, "content": before["content"]}
            joined.pop()
        joined.append(message)
    return joined


SHAREGPT = DialogueFormat(
    "sharegpt",
    lambda row: isinstance(row, dict) and isinstance(row.get("conversations"), list),
    parse=_parse_sharegpt,
    show=_show_sharegpt,
)
"""Calls are written in the agent's own tags, because a ``function_call`` turn has no place for other text."""


def _parse_agent_flan(row: Any) -> Dialogue:
    row = row_object(row, "conversation")
    messages = message_list(row, "conversation")
    dialogue = _dialogue(messages, "conversation")
    untrained = sum(message["role"] == "assistant" and message.get("loss") is False for message in messages)
    lost = (f"the flag of {untrained} turns that are not trained on",) if untrained else ()
    return replace(dialogue, facts={"id": row_id(row)}, lost=dialogue.lost + lost)


def _show_agent_flan(dialogue: Dialogue, record: Record, context: Context) -> dict[str, Any]:
    spec = context.spec(record.agent)
    turns: list[dict[str, Any]] = [{"role": "user", "content": dialogue.question, "loss": False}]
    for turn in dialogue.turns:
        turns.append({"role": "assistant", "content": with_call(turn, spec), "loss": True})
        turns += [{"role": "user", "content": use.result or "", "loss": False} for use in turn.uses]
    return {"id": record.id, "conversation": turns}


AGENT_FLAN = DialogueFormat(
    "agent_flan",
    lambda row: isinstance(row, dict) and isinstance(row.get("conversation"), list),
    parse=_parse_agent_flan,
    show=_show_agent_flan,
    loses="gold answer, verdict, cost and provenance",
)
"""Calls are in the assistant's text (ReAct, or the agent's tags), results in the user's next turn."""


def _parse_react(row: Any) -> Dialogue:
    row = row_object(row, "question and text")
    turns = _react_turns(text_of(row, "text"))
    if not turns:
        raise DataError("text: expected `Thought:`, `Action:` or `Final Answer:`, found none of them")
    return Dialogue(text_of(row, "question"), turns, {"id": row_id(row)})


def _show_react(dialogue: Dialogue, record: Record, context: Context) -> dict[str, Any]:
    spec = context.spec(record.agent)
    lines = []
    for turn in dialogue.turns:
        thoughts, answer = _plain(turn.text, spec)
        lines += [f"Thought: {thoughts}"] if thoughts else []
        for use in turn.uses:
            lines += [f"Action: {use.tool}", f"Action Input: {use.text()}", f"Observation: {use.result}"]
        lines += [f"Final Answer: {answer}"] if answer is not None else []
    return {"question": record.question, "text": "\n".join(lines)}


REACT = DialogueFormat(
    "react",
    lambda row: isinstance(row, dict) and isinstance(row.get("text"), str) and "question" in row,
    parse=_parse_react,
    show=_show_react,
    loses="roles (all but tools and answer become thoughts), id, gold answer, verdict, cost and provenance",
)
"""``Action: tool`` with ``Action Input:``, or ``Action: tool[input]``. ``Finish[x]`` is the answer."""


def _react_turns(text: str) -> tuple[AgentTurn, ...]:
    """Return the turns of a trace, empty for any other text."""
    turns: list[AgentTurn] = []
    open_turn, action = AgentTurn(), ""
    for word, content in _parts(text):
        if word in ("Thought", "Action") and open_turn.uses:
            turns.append(open_turn)
            open_turn = AgentTurn()
        if word == "Thought":
            open_turn = replace(open_turn, text=f"{open_turn.text}\n\n{content}".strip())
        elif word == "Action":
            action = content
            if brackets := _BRACKETS.match(content):
                if brackets[1].strip().lower() == _FINISH.lower():
                    turns += _ended(open_turn, brackets[2])
                    open_turn = AgentTurn()
                else:
                    open_turn = replace(open_turn, uses=(Use(brackets[1].strip(), brackets[2]),))
        elif word == "Action Input":
            if action == _FINISH:
                turns += _ended(open_turn, _final_answer(_argument(content)))
                open_turn = AgentTurn()
            else:
                open_turn = replace(open_turn, uses=(Use(action, _argument(content)),))
        elif word == "Observation" and open_turn.uses:
            use = replace(open_turn.uses[-1], result=content)
            turns.append(replace(open_turn, uses=(use,)))
            open_turn = AgentTurn()
        elif word == "Final Answer":
            turns += _ended(open_turn, content)
            open_turn = AgentTurn()
    return (*turns, *((open_turn,) if open_turn.text or open_turn.uses else ()))


def _parts(text: str) -> list[tuple[str, str]]:
    marks = list(_WORD.finditer(text))
    if not marks:
        return []
    if text[: marks[0].start()].strip():
        return [("Thought", text[: marks[0].start()].strip()), *_parts(text[marks[0].start() :])]
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return [(mark[1], text[mark.end() : end].strip()) for mark, end in zip(marks, ends, strict=True)]


def _final_answer(arguments: Any) -> str:
    """Return the answer in the arguments of :data:`_FINISH`: ToolBench's ``{return_type, final_answer}`` or a text.

    Raises:
        DataError: The run ends without an answer.
    """
    answer = arguments.get("final_answer") if isinstance(arguments, Mapping) else arguments
    if not isinstance(answer, str) or not answer.strip():
        raise DataError(f"{_FINISH}: got {str(arguments)[:80]}, expected a final_answer; the run gave up")
    return answer


def _ended(turn: AgentTurn, answer: str) -> list[AgentTurn]:
    return [*([turn] if turn.text else []), AgentTurn(answer, final=True)]


def _argument(text: str) -> Any:
    """Return the parameters if the input is a JSON object, else the text."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text


def _plain(text: str, spec: AgentSpec) -> tuple[str, str | None]:
    """Return the content of a turn's roles as one thought, and its answer or ``None``."""
    steps = split(text, spec).steps
    if not steps:
        return text.strip(), None
    thoughts = [step.content.strip() for step in steps if step.role != spec.answer_role]
    answers = [step.content.strip() for step in steps if step.role == spec.answer_role]
    return "\n\n".join(thoughts), answers[-1] if answers else None
