"""What is made of a published data set once it is here."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from afm.datasets.prepare import GoldForm

if TYPE_CHECKING:
    from typing import Self

    from afm.datasets.readers import Reader


class Product(StrEnum):
    """Kinds of files that published rows become."""

    TASKS = "tasks"
    """JSONL of questions with gold answers: for `afm data distill`, `afm data queries`, `afm eval`."""
    RL = "rl"
    """Parquet for `afm rl`."""
    SFT = "sft"
    """Alpaca JSON for `afm sft`, with its entry in ``dataset_info.json``."""
    CHAT = "chat"
    """JSONL of ``{messages}``, every message with its role: for `afm convert` and `afm data negative`."""


class Preparation(BaseModel):
    """One file that is made.

    Attributes:
        reader: Name of the layout of the rows, see :mod:`afm.datasets.readers`.
        question_key: Where a row of reader ``plain`` holds its question; by default ``question``.
        answer_key: Where it holds its answer; by default ``answer``.
        into: What they become.
        name: Of the file, without its ending; by default the set's.
        files: Patterns of the files of the set that are read, in the order of their names.
        data_source: Of rows that name none.
        agent: Whose prompt the rows of ``rl`` get.
        ability: Value of the column of that name.
        split: Value of ``extra_info.split``.
        ground_truth: How rows of ``rl`` hold their gold answers.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    reader: str
    into: Product
    question_key: str | None = Field(default=None, min_length=1)
    answer_key: str | None = Field(default=None, min_length=1)
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_][\w.-]*$")
    files: tuple[str, ...] = ("*",)
    data_source: str | None = None
    agent: str = "mhqa"
    ability: str = "qa"
    split: str = "train"
    ground_truth: GoldForm | None = None

    @field_validator("reader")
    @classmethod
    def _known(cls, value: Any) -> Any:
        from afm.datasets.readers import checked_reader

        return checked_reader(value)

    @model_validator(mode="after")
    def _keys_of_plain_rows(self) -> Self:
        if self.reader != "plain" and (self.question_key or self.answer_key):
            raise ValueError(
                f"reader {self.reader!r} knows its keys; question_key and answer_key go with reader 'plain'"
            )
        return self

    def row_reader(self) -> Reader:
        """The reader of the rows, with its keys."""
        from afm.datasets.readers import READERS
        from afm.datasets.readers.plain import ANSWER_KEY, QUESTION_KEY, plain_reader

        if self.reader != "plain":
            return READERS[self.reader]
        return plain_reader(self.question_key or QUESTION_KEY, self.answer_key or ANSWER_KEY)
