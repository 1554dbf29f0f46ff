"""Checked reading of a row's chat messages in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from afm.errors import DataError, json_word


def text_of(row: Mapping[str, Any], key: str) -> str:
    """Return the text under ``key``. A missing one is an error."""
    if key not in row:
        raise DataError(f"no key {key!r} among {sorted(row)[:8]}")
    if not isinstance(row[key], str):
        raise DataError(f"{key}: got {json_word(row[key])}, expected a text")
    return str(row[key])


def row_id(row: Mapping[str, Any], *keys: str) -> str:
    """Return the id of a row under the first of ``keys`` (by default ``id``) with one, else ``""``. 0 is an id."""
    ids = (row.get(key) for key in keys or ("id",))
    return next((str(value) for value in ids if value not in (None, "")), "")


def loss_flag(message: Mapping[str, Any]) -> bool:
    """Return whether a message is trained on: its flag ``loss``, by default true. Any other value is an error."""
    flag = message.get("loss")
    if flag is not None and not isinstance(flag, bool):
        raise DataError(f"loss: got {flag!r}, expected true or false")
    return flag is not False


def tools_text(tools: Any) -> str:
    """Return declared tools for chat templates: the JSON text of a list of objects, or ``""`` without tools.

    Raises:
        DataError: ``tools`` is neither a list of objects nor the JSON text of one.
    """
    listed = tools or []
    if isinstance(listed, str):
        try:
            listed = json.loads(listed)
        except ValueError as error:
            raise DataError(f"tools: invalid JSON: {error}") from None
    if not isinstance(listed, list) or not all(isinstance(tool, Mapping) for tool in listed):
        raise DataError(f"tools: got {str(tools)[:80]}, expected a list of objects")
    return tools if isinstance(tools, str) else json.dumps(listed, ensure_ascii=False) if listed else ""


def message_list(
    row: Mapping[str, Any], column: str, role_key: str = "role", content_key: str | None = "content"
) -> list[Mapping[str, Any]]:
    """Return the messages under ``column``, at least one, each with a role and, unless its key is ``None``, a text.

    Raises:
        DataError: There are no messages of this form, or a ``loss`` is neither true nor false.
    """
    messages = row.get(column)
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{column}: got {str(messages)[:40]!r}, expected a list of messages")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(f"{column}[{number}]: got {json_word(message)}, expected a message")
        try:
            if role_key not in message:
                shown = f"{{{role_key}, {content_key or 'content'}}}"
                raise DataError(
                    f"no key {role_key!r} among {sorted(message)[:8]}; write each message as {shown}"
                )
            text_of(message, role_key)
            if content_key is not None:
                text_of(message, content_key)
            loss_flag(message)
        except DataError as error:
            raise DataError(f"{column}[{number}]: {error.message}") from None
    return messages


def content_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message with its text parts joined. Other content is an error."""
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            kinds = [part.get("type") for part in content if isinstance(part, Mapping) and "text" not in part]
            got = f"got a part of type {str(kinds[0])!r}, " if kinds else ""
            picture = (
                "; pictures are not read: write a text in its place, or leave the row out"
                if "image" in got
                else ""
            )
            raise DataError(f"content: {got}expected text parts only{picture}")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise DataError(f"content: got {json_word(content)}, expected a text")
    return content


def hidden_reasoning(message: Mapping[str, Any]) -> str:
    """Return the reasoning that servers send next to the content of a message, or ``""`` without it."""
    for key in ("reasoning_content", "reasoning"):
        if isinstance(message.get(key), str) and message[key].strip():
            return str(message[key]).strip()
    return ""


def called_function(call: Any) -> dict[str, Any]:
    """Return ``{name, arguments}`` of one element of ``tool_calls``, decoded. An invalid call is an error."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"tool_calls: got {str(call)[:80]!r}, expected {{function: {{name, arguments}}}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise DataError(f"tool_calls: arguments of {function['name']!r} are not JSON: {error}") from None
    if not isinstance(arguments, Mapping):
        raise DataError(
            f"tool_calls: arguments of {function['name']!r}: got {str(arguments)[:40]!r}, expected an object"
        )
    return {"name": function["name"], "arguments": arguments}


NO_QUESTION = (
    "got a message of the assistant before any question of the user; write the whole run: `state['messages']` of "
    "LangGraph, `result.to_input_list()` of the OpenAI Agents SDK"
)


def unknown_role(role: object) -> str:
    """Return the error of a role that no chat message has, with what to write instead of memory of smolagents."""
    steps = (
        "; write `agent.memory.get_full_steps()` of smolagents"
        if role in ("tool-call", "tool-response")
        else ""
    )
    return f"role: got {role!r}, expected system, user, assistant or tool{steps}"


_RESPONSE_ITEMS = ("function_call", "function_call_output", "reasoning")


_LANGCHAIN_ROLES = {
    "human": "user",
    "ai": "assistant",
    **dict.fromkeys(("system", "developer", "tool", "function")),
}
"""Maps the types of LangChain's messages to roles. ``None`` if they are the same."""
_CALL_PARTS = ("tool_use", "function_call", "tool_call")
_REASONING_PARTS = ("reasoning", "thinking")


def is_message(item: Any) -> bool:
    """Return whether a value is a chat message, one of LangChain, or an item of the Responses API."""
    known = isinstance(item, dict) and ("role" in item or item.get("type") in _RESPONSE_ITEMS)
    return known or _langchain(item) is not None


def _langchain(item: Any) -> tuple[str, Mapping[str, Any]] | None:
    """Return the type and the fields of a message of LangChain, ``None`` for anything else.

    Its forms are ``message.model_dump()``, ``messages_to_dict`` (fields in ``data``) and ``dumpd`` (in ``kwargs``).
    """
    if not isinstance(item, dict) or "role" in item:
        return None
    fields = next((item[key] for key in ("data", "kwargs") if isinstance(item.get(key), dict)), item)
    kind = str(fields.get("type", item.get("type"))).removesuffix("MessageChunk").lower()
    return (kind, fields) if kind in _LANGCHAIN_ROLES and "content" in fields else None


def chat_of_langchain(items: Any) -> Any:
    """Return messages of LangChain and LangGraph as chat messages. Anything else in the list stays."""
    return [_chat_message(*found) if (found := _langchain(item)) else item for item in items]


def _chat_message(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    content, more = fields["content"], fields.get("additional_kwargs") or {}
    message: dict[str, Any] = {"role": _LANGCHAIN_ROLES[kind] or kind, "content": content}
    message |= {key: fields[key] for key in ("tool_call_id", "name") if fields.get(key)}
    message |= {"reasoning_content": more["reasoning_content"]} if "reasoning_content" in more else {}
    # A call whose arguments are no JSON stays one, so that its row is refused and not shortened.
    calls = [*(fields.get("tool_calls") or ()), *(fields.get("invalid_tool_calls") or ())]
    if calls:
        message["tool_calls"] = [
            {"id": call.get("id"), "function": {"name": call.get("name"), "arguments": call.get("args")}}
            for call in calls
        ]
    if kind == "ai" and isinstance(content, list):
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
        hidden = [_reasoning(part) for part in parts if part.get("type") in _REASONING_PARTS]
        others = [part for part in parts if part.get("type") not in (*_CALL_PARTS, *_REASONING_PARTS)]
        message |= {"content": others, **({"reasoning_content": "\n\n".join(hidden)} if any(hidden) else {})}
    return message


def _reasoning(part: Mapping[str, Any]) -> str:
    """Return the words of a part of reasoning: a summary of the Responses API, or one text."""
    words = next((part[key] for key in ("summary", "reasoning", "thinking") if part.get(key)), "")
    return content_text({"content": words})


def chat_of_items(items: Any) -> Any:
    """Return items of OpenAI's Responses API, such as ``to_input_list()`` of its Agents SDK, as chat messages.

    A text and the calls after it are one message of the assistant. Summaries of reasoning become its hidden reasoning.
    """
    if not any(isinstance(item, dict) and item.get("type") in _RESPONSE_ITEMS for item in items):
        return items
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for number, item in enumerate(items):
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            content = item.get("output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind == "reasoning":
            thoughts += [content_text({"content": item.get("summary") or item.get("content") or ""})]
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            messages[-1].setdefault("tool_calls", []).append(
                {"id": item.get("call_id"), "function": function}
            )
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        else:
            raise DataError(
                f"messages[{number}]: got an item of type {kind!r}, expected message, {', '.join(_RESPONSE_ITEMS)}"
            )
        if thoughts and messages and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = "\n\n".join(thoughts)
            thoughts = []
    return messages
