"""Convert Agent-FLAN's conversations, and OpenAI's messages with tool calls, for LLaMA-Factory's processors.

Agent-FLAN (arXiv 2403.12881) marks for each message whether it is trained on. Its chat protocol is the template
``agent_flan``: every turn of the user or the system reads ``<|Human|>`` + U+0D46 + text + newline + blank, every turn of
the assistant ``<|Assistant|>`` + U+0D46 + text + U+0D3F + newline + blank. U+0D46 and U+0D3F are single tokens of
Llama-2, and U+0D3F ends a turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from afm.errors import DataError, json_word
from afm.trajectory.chat import called_function, content_text, loss_flag, message_list, tools_text

if TYPE_CHECKING:
    from llamafactory.data.parser import DatasetAttr

Aligned = dict[str, Any]
"""``_prompt``, ``_response``, ``_system``, ``_tools`` and the media columns of one row."""

_USER_SIDE = ("user", "observation")
_ASSISTANT_SIDE = ("assistant", "function")


def turn(role: str, content: str, *, loss: bool = True) -> dict[str, Any]:
    """Return one turn; ``loss`` only matters for the assistant's turns."""
    return {"role": role, "content": content, "loss": loss}


def aligned_row(turns: Sequence[dict[str, Any]], *, system: str = "", tools: str = "") -> Aligned:
    """Return a row whose last turn is the response."""
    return {
        "_prompt": list(turns[:-1]),
        "_response": list(turns[-1:]),
        "_system": system,
        "_tools": tools,
        "_images": None,
        "_videos": None,
        "_audios": None,
    }


def alternating(prompt: Sequence[Mapping[str, Any]]) -> None:
    """Check that user and assistant alternate in a prompt, and that the user is first and last.

    Raises:
        DataError: It does not.
    """
    sides = (_USER_SIDE, _ASSISTANT_SIDE)
    sound = all(message["role"] in sides[number % 2] for number, message in enumerate(prompt))
    if not sound or len(prompt) % 2 != 1:
        raise DataError("expected alternating turns of user and assistant, the assistant's last")


TEMPLATE: Final = "agent_flan"
HUMAN: Final = "<|Human|>\u0d46"
ASSISTANT: Final = "<|Assistant|>\u0d46"
TURN_END: Final = "\n "
END_TOKEN: Final = "\u0d3f"


def agent_flan_row(row: Mapping[str, Any], column: str, template: str) -> Aligned:
    """Convert ``{id, conversation: [{role, content, loss}]}`` to an aligned row.

    Consecutive turns of the user become one turn. Under the template ``agent_flan``, they are joined as its protocol
    writes them; under any other template, by a blank line.

    Args:
        column: Column of the messages if not ``conversation``.
        template: Name of the chat template.

    Raises:
        DataError: A message is invalid, or turns do not alternate.
    """
    column = column if column in row else "conversation"
    messages = message_list(row, column)
    roles = [message["role"] for message in messages]
    for number, (role, message) in enumerate(zip(roles, messages, strict=True)):
        place = f"{column}[{number}]"
        if role not in ("system", "user", "assistant"):
            raise DataError(f"{place}.role: got {role!r}, expected system, user or assistant")
        if message.get("loss") and role != "assistant":
            raise DataError(
                f"{place}.loss: set on a turn of the {role}, expected only on turns of the assistant"
            )
        if role == "assistant" and message.get("loss") is None:
            raise DataError(f"{place}: no key 'loss'; expected true or false on every turn of the assistant")
    system = messages[0]["content"] if roles[0] == "system" else ""
    turns = _turns(messages[1:] if roles[0] == "system" else messages, column, template)
    return aligned_row(turns, system=system)


def _turns(messages: Sequence[Mapping[str, Any]], column: str, template: str) -> list[dict[str, Any]]:
    joint = TURN_END + HUMAN if template == TEMPLATE else "\n\n"
    turns = []
    for assistant, run in groupby(messages, key=lambda message: message["role"] == "assistant"):
        group = list(run)
        if assistant and len(group) > 1:
            raise DataError(f"{column}: got {len(group)} consecutive turns of the assistant, expected one")
        content = joint.join(message["content"] for message in group)
        loss = bool(group[0].get("loss", False))
        turns.append(turn("assistant" if assistant else "user", content, loss=loss))
    if not turns or turns[0]["role"] != "user" or turns[-1]["role"] != "assistant":
        raise DataError(f"{column}: expected alternating turns, the user's first and the assistant's last")
    return turns


def register_agent_flan() -> None:
    """Register the chat protocol with LLaMA-Factory (0.9.5, data/template.py); safe to repeat."""
    from llamafactory.data.formatter import EmptyFormatter, StringFormatter
    from llamafactory.data.template import TEMPLATES, register_template

    if TEMPLATE in TEMPLATES:
        return
    register_template(
        name=TEMPLATE,
        format_system=StringFormatter(slots=[HUMAN + "{{content}}" + TURN_END]),
        format_user=StringFormatter(slots=[HUMAN + "{{content}}" + TURN_END + ASSISTANT]),
        format_assistant=StringFormatter(slots=["{{content}}", {"eos_token"}, TURN_END]),
        format_prefix=EmptyFormatter(slots=[{"bos_token"}]),
        stop_words=[END_TOKEN],
        replace_eos=True,
        replace_jinja_template=True,  # otherwise Llama-2's [INST] is saved, and the model is served with another protocol
    )


_ROLES = ("system", "developer", "user", "assistant", "tool")
_SEVERAL_RESULTS = "\n</tool_response>\n<tool_response>\n"


def openai_row(row: Mapping[str, Any], attr: DatasetAttr, template: str) -> Aligned:
    """Convert ``{messages: [...], tools: [...]}`` to an aligned row.

    Results of tools have no loss, because the environment wrote them. ``weight: 0`` (OpenAI's key) or ``loss: false``
    excludes a turn of the assistant from the loss. Unlike LLaMA-Factory's ``openai`` format, this adds no sentence about
    thinking to the system prompt and keeps text next to a tool call. ``reasoning_content`` becomes the thought before a
    message, between the words with which the template marks thoughts.

    Raises:
        DataError: A message is invalid, or turns do not alternate.
    """
    column = str(attr.messages) if attr.messages in row else "messages"
    messages = message_list(row, column, content_key=None)
    system, results, turns = "", [], []  # type: str, list[str], list[dict[str, Any]]
    for number, message in enumerate(messages):
        role = message["role"]
        try:
            if role not in _ROLES:
                raise DataError(f"role: got {role!r}, expected one of {', '.join(_ROLES)}")
            if role in ("system", "developer"):
                if number:
                    raise DataError(f"a {role} message after the first message")
                system = content_text(message)
            elif role == "tool":
                if not turns or turns[-1]["role"] != "function":
                    raise DataError("a tool result without a call before it")
                results.append(content_text(message))
            else:
                turns += _observation(results, template)
                results = []
                turns.append(
                    _assistant(message, template)
                    if role == "assistant"
                    else turn("user", content_text(message))
                )
        except DataError as error:
            raise DataError(f"{column}[{number}]: {error.message}") from None
    if results or not turns or turns[-1]["role"] not in ("assistant", "function"):
        raise DataError(f"{column}: the last message is {messages[-1]['role']!r}'s, expected the assistant's")
    tools = tools_text(row.get(str(attr.tools or "tools")))
    return aligned_row(turns, system=system, tools=tools)


def without_nulls(value: Any) -> Any:
    """Return ``value`` without keys that are null: in a table, each row has the keys of all rows."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _assistant(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    loss = loss_flag(message) and _weight(message)
    if message.get("function_call"):
        raise DataError("function_call: expected tool_calls, which replaced it")
    calls = message.get("tool_calls")
    if not calls:
        return turn("assistant", _thought(message, template) + content_text(message), loss=loss)
    said = _thought(message, template) + (content_text(message) if message.get("content") else "")
    written = json.dumps([called_function(call) for call in calls], ensure_ascii=False)
    written_by = _template(template)
    begin, end = written_by.tool_call_words if written_by else ("<tool_call>", "</tool_call>")
    if begin in said or end in written:
        raise DataError(f"the text contains {begin!r}, with which the template marks calls")
    joint = "\n" if said and not said.endswith("\n") else ""  # as in the chat templates of models
    return turn("function", f"{said}{joint}{begin}{written}{end}", loss=loss)


def _thought(message: Mapping[str, Any], template: str) -> str:
    """Return the thought before a message, as the template writes it."""
    thought = message.get("reasoning_content")
    if thought is None:
        return ""
    if not isinstance(thought, str):
        raise DataError(f"reasoning_content: got {json_word(thought)}, expected a text")
    written_by = _template(template)
    begin, end = written_by.thought_words if written_by else ("<think>\n", "\n</think>\n\n")
    content = message.get("content")
    if isinstance(content, str) and begin.strip() in content:
        raise DataError(
            f"reasoning_content: the content also contains {begin.strip()!r}, with which the template marks thoughts"
        )
    return f"{begin}{thought.strip()}{end}" if thought.strip() else ""


def _weight(message: Mapping[str, Any]) -> bool:
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise DataError(f"weight: got {weight!r}, expected 0 or 1")
    return weight != 0


def _observation(results: list[str], template: str) -> list[dict[str, Any]]:
    if not results:
        return []
    written_by = _template(template)
    slots = written_by.format_observation.slots if written_by else []
    wrapped = any("tool_response" in slot for slot in slots if isinstance(slot, str))
    return [turn("observation", (_SEVERAL_RESULTS if wrapped else "\n").join(results))]


def _template(name: str) -> Any:
    """Return LLaMA-Factory's template of this name, or ``None``."""
    from llamafactory.data.template import TEMPLATES

    return TEMPLATES.get(name)
