"""Questions of everyday chat with their answers, for which an agent needs no tool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from afm.errors import DataError
from afm.trajectory.chat import row_id


@dataclass(frozen=True, slots=True)
class GeneralQuestion:
    """One question and what was answered.

    Attributes:
        system: What a system message said before it, if one did.
    """

    id: str
    question: str
    answer: str
    system: str = ""


def general_question(row: Any, *, default_id: str) -> GeneralQuestion:
    """Read ``{question, answer}`` or OpenAI's ``{messages: [{role, content}]}``.

    Of several answers the first counts, of a conversation its first question and the reply to it.

    Raises:
        DataError: The row is neither, a text is empty, or the reply calls a tool (without location).
    """
    if not isinstance(row, Mapping):
        raise DataError(f"got {type(row).__name__}, expected an object")
    identity = row_id(row) or default_id
    if "messages" in row:
        return _first_exchange(row["messages"], identity)
    answer = row.get("answer")
    if isinstance(answer, list) and answer:
        answer = answer[0]
    return GeneralQuestion(identity, _text(row.get("question"), "question"), _text(answer, "answer"))


def _first_exchange(messages: Any, identity: str) -> GeneralQuestion:
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise DataError(f"messages: got {str(messages)[:40]!r}, expected a list of messages")
    system = ""
    if messages and messages[0].get("role") in ("system", "developer"):
        system = _text(messages[0].get("content"), "messages[0].content")
        messages = messages[1:]
    roles = [message.get("role") for message in messages[:2]]
    if roles != ["user", "assistant"]:
        raise DataError(f"messages: begins with the turns {roles}, expected user, then assistant")
    asked, replied = messages[:2]
    if replied.get("tool_calls") or replied.get("function_call"):
        raise DataError("messages: the first reply calls a tool; expected a question that needs none")
    question, answer = (
        _text(message.get("content"), f"{message['role']}'s content") for message in (asked, replied)
    )
    return GeneralQuestion(identity, question, answer, system)


def _text(value: Any, what: str) -> str:
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        value = "".join(str(part.get("text", "")) for part in value if part.get("type") == "text")
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{what}: got {str(value)[:40]!r}, expected a text that is not empty")
    return value
