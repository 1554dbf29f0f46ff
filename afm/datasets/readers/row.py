"""What readers have in common: the rows they make, and fields taken out of a row with a reason when they are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from afm.datasets.schema import Task
from afm.errors import DataError

_SHOWN_CHARS = 60


class Message(BaseModel):
    """One turn of a conversation.

    Attributes:
        role: ``system``, ``user``, ``assistant`` or ``tool``.
        loss: Whether it is trained on, where the data set says so.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: str
    content: str
    loss: bool | None = None


class Conversation(BaseModel):
    """A dialogue with an agent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(min_length=1)
    messages: tuple[Message, ...] = Field(min_length=1)
    data_source: str = ""


class AlpacaRow(BaseModel):
    """One sample of an SFT set, as LLaMA-Factory reads it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instruction: str = Field(min_length=1)
    input: str = ""
    output: str = Field(min_length=1)
    system: str | None = None


Made = Task | Conversation | AlpacaRow


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the rows of one layout.

    Attributes:
        name: Key in the registry.
        data_source: Of its tasks, which chooses the reward; empty where every row says it itself.
        read: Makes something of a row; receives an id for rows that have none. Raises :class:`DataError`, without a
            place, for a row that it refuses.
        makes_conversations: Whether that is a conversation.
        unpack: Takes the rows out of one that holds many, of a file whose stem it is given.
    """

    name: str
    data_source: str
    read: Callable[[Mapping[str, Any], str], Made]
    makes_conversations: bool = False
    unpack: Callable[[str, Mapping[str, Any]], Iterable[Mapping[str, Any]]] | None = None


def text(row: Mapping[str, Any], *keys: str) -> str:
    """The text under the first of ``keys`` that is there.

    Raises:
        DataError: It is missing, empty or no text.
    """
    value = next((row[key] for key in keys if row.get(key) is not None), None)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"`{keys[0]}`: expected a text that is not empty, got {shown(value)}")
    return value.strip()


def identity(row: Mapping[str, Any], default: str, *keys: str) -> str:
    """The row's own id, else ``default``."""
    value = next((row[key] for key in keys if row.get(key) not in (None, "")), default)
    return str(value)


def answers(row: Mapping[str, Any], key: str, values: Iterable[Any]) -> list[str]:
    """Accepted answers without blanks and repetitions, in their order.

    Raises:
        DataError: None is left.
    """
    found = dict.fromkeys(value.strip() for value in values if isinstance(value, str) and value.strip())
    if not found:
        raise DataError(f"`{key}`: expected at least one answer, got {shown(row.get(key))}")
    return list(found)


def listed(value: Any) -> list[Any]:
    """A list, a tuple or one value as a list; nothing as an empty one."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    """``value`` when it is an object.

    Raises:
        DataError: It is not.
    """
    if not isinstance(value, Mapping):
        raise DataError(f"`{what}`: expected an object, got {shown(value)}")
    return value


def kept(row: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Those further fields that are there."""
    return {key: row[key] for key in keys if row.get(key) not in (None, "")}


def shown(value: object) -> str:
    """A value, short enough for a message."""
    told = repr(value)
    return told if len(told) <= _SHOWN_CHARS else f"{told[:_SHOWN_CHARS]}..."
