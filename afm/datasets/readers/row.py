"""The rows that readers make, and helpers to get fields of a row or an error with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from afm.datasets.schema import Task
from afm.errors import DataError
from afm.trajectory.record import FrozenModel

_MESSAGE_CHARS = 60


class ChatMessage(FrozenModel):
    """One turn of ``system``, ``user``, ``assistant`` or ``tool``. ``loss`` is set if the data set marks trained turns."""

    role: str
    content: str
    loss: bool | None = None


class Conversation(FrozenModel):
    """A dialogue with an agent."""

    id: str = Field(min_length=1)
    messages: tuple[ChatMessage, ...] = Field(min_length=1)
    data_source: str = ""


class AlpacaRow(FrozenModel):
    """One sample of an SFT set in LLaMA-Factory's format."""

    instruction: str = Field(min_length=1)
    input: str = ""
    output: str = Field(min_length=1)
    system: str | None = None


ReadRow = Task | Conversation | AlpacaRow
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowReader:
    """A reader of the rows of one layout.

    Attributes:
        make: Converts a row, with a default id for rows without one. Raises :class:`DataError`, without location, for a
            row that it refuses.
        data_source: Data source of its rows, which chooses the reward. Empty if every row names it.
        makes_conversations: Whether ``make`` returns a :class:`Conversation`.
        unpack: Splits a row that holds many. Receives the stem of the file and the row.
    """

    make: Callable[[Row, str], ReadRow]
    data_source: str = ""
    makes_conversations: bool = False
    unpack: Callable[[str, Row], Iterable[Row]] | None = None

    def read(self, row: Row, default_id: str) -> ReadRow:
        """Convert a row with ``make`` and set the layout's data source."""
        made = self.make(row, default_id)
        if not self.data_source or isinstance(made, AlpacaRow) or made.data_source:
            return made
        return made.model_copy(update={"data_source": self.data_source})


def text_field(row: Row, *keys: str) -> str:
    """Return the text under the first present key of ``keys``. A missing, empty or other value is an error."""
    value = next((row[key] for key in keys if row.get(key) is not None), None)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"`{keys[0]}`: expected a text that is not empty, got {abbreviate(value)}")
    return value.strip()


def accepted_answers(row: Row, key: str, values: Iterable[Any]) -> list[str]:
    """Return the accepted answers in order, stripped and without repetitions. No answer is an error."""
    unique = dict.fromkeys(value.strip() for value in values if isinstance(value, str) and value.strip())
    if not unique:
        raise DataError(f"`{key}`: expected at least one answer, got {abbreviate(row.get(key))}")
    return list(unique)


def as_list(value: Any) -> list[Any]:
    """Return a list, a tuple or a single value as a list. ``None`` gives an empty list."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def object_field(value: Any, what: str) -> Mapping[str, Any]:
    """Return ``value`` if it is an object, else raise an error."""
    if not isinstance(value, Mapping):
        raise DataError(f"`{what}`: expected an object, got {abbreviate(value)}")
    return value


def optional_fields(row: Row, *keys: str) -> dict[str, Any]:
    """Return those of the optional fields that are present."""
    return {key: row[key] for key in keys if row.get(key) not in (None, "")}


def abbreviate(value: object) -> str:
    """Shorten a value for a message."""
    text = repr(value)
    return text if len(text) <= _MESSAGE_CHARS else f"{text[:_MESSAGE_CHARS]}..."


def last_question(row: Row) -> str:
    """Return the last user turn."""
    turns = [
        turn
        for turn in as_list(row.get("prompt"))
        if isinstance(turn, Mapping) and turn.get("role") == "user"
    ]
    if not turns:
        raise DataError(f"`prompt`: expected [{{role: user, content}}], got {abbreviate(row.get('prompt'))}")
    return text_field(turns[-1], "content")


def gold_answer(row: Row) -> str:
    """Return the gold answer as written in the row."""
    return text_field(object_field(row.get("reward_model"), "reward_model"), "ground_truth")
