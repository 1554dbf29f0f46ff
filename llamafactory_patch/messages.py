"""Chat messages of a row, checked, and the aligned form that LLaMA-Factory's processors take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from afm.errors import DataError

Aligned = dict[str, Any]
"""``_prompt``, ``_response``, ``_system``, ``_tools`` and the media columns of one row."""

_USER_SIDE = ("user", "observation")
_ASSISTANT_SIDE = ("assistant", "function")


def turn(role: str, content: str, *, loss: bool = True) -> dict[str, Any]:
    """One turn; ``loss`` matters for the assistant's alone."""
    return {"role": role, "content": content, "loss": loss}


def aligned_row(turns: Sequence[dict[str, Any]], *, system: str = "", tools: str = "") -> Aligned:
    """A row whose last turn is the response."""
    return {
        "_prompt": list(turns[:-1]),
        "_response": list(turns[-1:]),
        "_system": system,
        "_tools": tools,
        "_images": None,
        "_videos": None,
        "_audios": None,
    }


def text_of(row: Mapping[str, Any], key: str) -> str:
    """The text under ``key``.

    Raises:
        DataError: There is none.
    """
    if key not in row:
        raise DataError(f"no key {key!r} among {sorted(row)[:8]}")
    if not isinstance(row[key], str):
        raise DataError(f"{key}: got {type(row[key]).__name__}, expected a text")
    return str(row[key])


def loss_flag(message: Mapping[str, Any]) -> bool:
    """Whether a message says that it is trained on; without a word it does.

    Raises:
        DataError: ``loss`` is neither true nor false.
    """
    flag = message.get("loss")
    if flag is not None and not isinstance(flag, bool):
        raise DataError(f"loss: got {flag!r}, expected true or false")
    return flag is not False


def tools_text(tools: Any) -> str:
    """Declared tools as chat templates take them: the JSON text of a list of objects, empty for none.

    Raises:
        DataError: They are no such list, nor its text.
    """
    listed = tools or []
    if isinstance(listed, str):
        try:
            listed = json.loads(listed)
        except ValueError as error:
            raise DataError(f"tools: no JSON: {error}") from None
    if not isinstance(listed, list) or not all(isinstance(tool, Mapping) for tool in listed):
        raise DataError(f"tools: got {str(tools)[:80]}, expected a list of objects")
    return tools if isinstance(tools, str) else json.dumps(listed, ensure_ascii=False) if listed else ""


def message_list(
    row: Mapping[str, Any], column: str, role_key: str = "role", content_key: str | None = "content"
) -> list[Mapping[str, Any]]:
    """The messages under ``column``, at least one, each with a role and (unless its key is ``None``) a text.

    Raises:
        DataError: There are none such, or one's ``loss`` is no flag.
    """
    messages = row.get(column)
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{column}: got {str(messages)[:40]!r}, expected a list of messages")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(f"{column}[{number}]: got {type(message).__name__}, expected a message")
        try:
            text_of(message, role_key)
            if content_key is not None:
                text_of(message, content_key)
            loss_flag(message)
        except DataError as error:
            raise DataError(f"{column}[{number}]: {error.message}") from None
    return messages


def alternating(prompt: Sequence[Mapping[str, Any]]) -> None:
    """Check that a prompt begins and ends with the user's side, in alternation with the assistant's.

    Raises:
        DataError: It does not.
    """
    sides = (_USER_SIDE, _ASSISTANT_SIDE)
    sound = all(message["role"] in sides[number % 2] for number, message in enumerate(prompt))
    if not sound or len(prompt) % 2 != 1:
        raise DataError("expected turns of user and assistant in alternation, the assistant's last")
