"""OpenAI chat messages with tool calls as training rows; the chat template renders the calls in its own way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llamafactory.data.parser import DatasetAttr
from llamafactory.data.template import TEMPLATES

from afm.errors import DataError
from llamafactory_patch.messages import Aligned, aligned_row, loss_flag, message_list, tools_text, turn

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SEVERAL_RESULTS = "\n</tool_response>\n<tool_response>\n"


def openai_row(row: Mapping[str, Any], attr: DatasetAttr, template: str) -> Aligned:
    """``{messages: [...], tools: [...]}`` as an aligned row.

    What tools returned is the environment's, so nothing of it is trained on. ``weight: 0`` (OpenAI's own key)
    or ``loss: false`` takes the loss off a turn of the assistant. Unlike LLaMA-Factory's ``openai`` format, no
    sentence about thinking is added to the system prompt and text beside a tool call is kept.

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
                system = _content(message)
            elif role == "tool":
                if not turns or turns[-1]["role"] != "function":
                    raise DataError("a result of a tool without a call before it")
                results.append(_content(message))
            else:
                turns += _observation(results, template)
                results = []
                turns.append(
                    _assistant(message, template) if role == "assistant" else turn("user", _content(message))
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


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise DataError("content: expected text parts only")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise DataError(f"content: got {type(content).__name__}, expected a text")
    return content


def _assistant(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    loss = loss_flag(message) and _weight(message)
    if message.get("function_call"):
        raise DataError("function_call: expected tool_calls, which took its place")
    calls = message.get("tool_calls")
    if not calls:
        return turn("assistant", _content(message), loss=loss)
    said = _content(message) if message.get("content") else ""
    written = json.dumps([_call(call) for call in calls], ensure_ascii=False)
    begin, end = (
        TEMPLATES[template].tool_call_words if template in TEMPLATES else ("<tool_call>", "</tool_call>")
    )
    if begin in said or end in written:
        raise DataError(f"the text holds {begin!r}, by which the template marks calls")
    joint = "\n" if said and not said.endswith("\n") else ""  # as the chat templates of models write it
    return turn("function", f"{said}{joint}{begin}{written}{end}", loss=loss)


def _weight(message: Mapping[str, Any]) -> bool:
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise DataError(f"weight: got {weight!r}, expected 0 or 1")
    return weight != 0


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"tool_calls: got {str(call)[:80]!r}, expected {{function: {{name, arguments}}}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise DataError(f"tool_calls: arguments of {function['name']!r} are no JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise DataError(
            f"tool_calls: arguments of {function['name']!r}: got {str(arguments)[:40]!r}, expected an object"
        )
    return {"name": function["name"], "arguments": arguments}


def _observation(results: list[str], template: str) -> list[dict[str, Any]]:
    if not results:
        return []
    slots = TEMPLATES[template].format_observation.slots if template in TEMPLATES else []
    wrapped = any("tool_response" in slot for slot in slots if isinstance(slot, str))
    return [turn("observation", (_SEVERAL_RESULTS if wrapped else "\n").join(results))]
