"""OpenAI chat messages with tool calls as training rows; the chat template renders the calls in its own way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llamafactory.data.parser import DatasetAttr
from llamafactory.data.template import TEMPLATES

from afm.errors import DataError
from afm.trajectory.chat import called_function, content_text, loss_flag, message_list, tools_text
from llamafactory_patch.conversations import Aligned, aligned_row, turn

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SEVERAL_RESULTS = "\n</tool_response>\n<tool_response>\n"


def openai_row(row: Mapping[str, Any], attr: DatasetAttr, template: str) -> Aligned:
    """``{messages: [...], tools: [...]}`` as an aligned row.

    What tools returned is the environment's, so nothing of it is trained on. ``weight: 0`` (OpenAI's own key)
    or ``loss: false`` takes the loss off a turn of the assistant. Unlike LLaMA-Factory's ``openai`` format, no
    sentence about thinking is added to the system prompt, text beside a tool call is kept, and
    ``reasoning_content`` is the thought before a message, between the words that the template marks thoughts with.

    Raises:
        DataError: A message is no such message, or turns do not alternate.
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
                    raise DataError(f"a {role} message behind the first")
                system = content_text(message)
            elif role == "tool":
                if not turns or turns[-1]["role"] != "function":
                    raise DataError("a result of a tool without a call before it")
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
    """``value`` without the keys that hold null: in a table, each row has the keys of all."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _assistant(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    loss = loss_flag(message) and _weight(message)
    if message.get("function_call"):
        raise DataError("function_call: expected tool_calls, which took its place")
    calls = message.get("tool_calls")
    if not calls:
        return turn("assistant", _thought(message, template) + content_text(message), loss=loss)
    said = _thought(message, template) + (content_text(message) if message.get("content") else "")
    written = json.dumps([called_function(call) for call in calls], ensure_ascii=False)
    begin, end = (
        TEMPLATES[template].tool_call_words if template in TEMPLATES else ("<tool_call>", "</tool_call>")
    )
    if begin in said or end in written:
        raise DataError(f"the text holds {begin!r}, by which the template marks calls")
    joint = "\n" if said and not said.endswith("\n") else ""  # as the chat templates of models write it
    return turn("function", f"{said}{joint}{begin}{written}{end}", loss=loss)


def _thought(message: Mapping[str, Any], template: str) -> str:
    """What was thought before a message, as the template writes it."""
    thought = message.get("reasoning_content")
    if thought is None:
        return ""
    if not isinstance(thought, str):
        raise DataError(f"reasoning_content: got {type(thought).__name__}, expected a text")
    begin, end = (
        TEMPLATES[template].thought_words if template in TEMPLATES else ("<think>\n", "\n</think>\n\n")
    )
    content = message.get("content")
    if isinstance(content, str) and begin.strip() in content:
        raise DataError(
            f"reasoning_content: the text holds {begin.strip()!r}, too, by which the template marks thoughts"
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
    slots = TEMPLATES[template].format_observation.slots if template in TEMPLATES else []
    wrapped = any("tool_response" in slot for slot in slots if isinstance(slot, str))
    return [turn("observation", (_SEVERAL_RESULTS if wrapped else "\n").join(results))]
