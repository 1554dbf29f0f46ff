"""What readers share: the rows they make, and fields taken out of a row with a reason when they are wrong."""

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
    """One turn of ``system``, ``user``, ``assistant`` or ``tool``; ``loss`` is set where the data set marks trained turns."""

    role: str
    content: str
    loss: bool | None = None


class Conversation(FrozenModel):
    """A dialogue with an agent."""

    id: str = Field(min_length=1)
    messages: tuple[ChatMessage, ...] = Field(min_length=1)
    data_source: str = ""


class AlpacaRow(FrozenModel):
    """One sample of an SFT set, as LLaMA-Factory reads it."""

    instruction: str = Field(min_length=1)
    input: str = ""
    output: str = Field(min_length=1)
    system: str | None = None


ReadRow = Task | Conversation | AlpacaRow
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RowReader:
    """Reads the rows of one layout.

    Attributes:
        make: Makes something of a row; receives an id for rows without one. Raises :class:`DataError`, without a
            place, for a row that it refuses.
        data_source: Of its rows, which chooses the reward; empty where every row names it.
        makes_conversations: Whether ``make`` returns a :class:`Conversation`.
        unpack: Takes the rows out of one that holds many, of a file whose stem it is given.
    """

    make: Callable[[Row, str], ReadRow]
    data_source: str = ""
    makes_conversations: bool = False
    unpack: Callable[[str, Row], Iterable[Row]] | None = None

    def read(self, row: Row, default_id: str) -> ReadRow:
        """What ``make`` makes of a row, with the layout's data source."""
        made = self.make(row, default_id)
        if not self.data_source or isinstance(made, AlpacaRow) or made.data_source:
            return made
        return made.model_copy(update={"data_source": self.data_source})


def text_field(row: Row, *keys: str) -> str:
    """The text under the first of ``keys`` that is there; an error where it is missing, empty or no text."""
    value = next((row[key] for key in keys if row.get(key) is not None), None)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"`{keys[0]}`: expected a text that is not empty, got {abbreviate(value)}")
    return value.strip()


def accepted_answers(row: Row, key: str, values: Iterable[Any]) -> list[str]:
    """Accepted answers without blanks and repetitions, at least one, in their order."""
    unique = dict.fromkeys(value.strip() for value in values if isinstance(value, str) and value.strip())
    if not unique:
        raise DataError(f"`{key}`: expected at least one answer, got {abbreviate(row.get(key))}")
    return list(unique)


def as_list(value: Any) -> list[Any]:
    """A list, a tuple or one value as a list; nothing as an empty one."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def object_field(value: Any, what: str) -> Mapping[str, Any]:
    """``value`` when it is an object, else an error."""
    if not isinstance(value, Mapping):
        raise DataError(f"`{what}`: expected an object, got {abbreviate(value)}")
    return value


def optional_fields(row: Row, *keys: str) -> dict[str, Any]:
    """Those further fields that are there."""
    return {key: row[key] for key in keys if row.get(key) not in (None, "")}


def abbreviate(value: object) -> str:
    """A value, short enough for a message."""
    text = repr(value)
    return text if len(text) <= _MESSAGE_CHARS else f"{text[:_MESSAGE_CHARS]}..."


def last_question(row: Row) -> str:
    """The last turn of the user."""
    turns = [
        turn
        for turn in as_list(row.get("prompt"))
        if isinstance(turn, Mapping) and turn.get("role") == "user"
    ]
    if not turns:
        raise DataError(f"`prompt`: expected [{{role: user, content}}], got {abbreviate(row.get('prompt'))}")
    return text_field(turns[-1], "content")


def gold_answer(row: Row) -> str:
    """The gold answer as it is written."""
    return text_field(object_field(row.get("reward_model"), "reward_model"), "ground_truth")
