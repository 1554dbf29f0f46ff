"""What is made of a published data set once it is here."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

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
    """JSONL of ``{messages}``, every message with its role: for `afm convert` and `afm data negative`; where every message says
    whether it is trained on, for `afm sft`, with an entry in ``dataset_info.json``."""


class Validation(BaseModel):
    """Questions that are held out of training.

    Attributes:
        rows: How many, at most a tenth of the set: those whose text has the smallest hash, so that a row stays where it is
            when the set grows, and rows of one question stay together.
        seed: Another choice.
        name: Of their file, beside that of the training rows.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: int = Field(ge=1)
    seed: int = 0
    name: str = Field(default="val", pattern=r"^[A-Za-z0-9_][\w.-]*$")


class Mix(BaseModel):
    """One file of rows of several sets.

    Attributes:
        into: ``rl``, each row with agent and ability of its part; or ``tasks``.
        parts: Names of what the sets prepare, in the order of the rows. Reader, files and choice are those of the
            preparation, whatever it is made into by itself.
        name: Of the file, as in :class:`Preparation`; by default the mix's.
        split: Value of ``extra_info.split`` in rows of ``rl``.
        ground_truth: How rows of ``rl`` hold their gold answers.
        validation: Rows of ``rl`` that go to a file of their own.
        prompts: What rows of ``rl`` ask with, by agent: files with ``{question}`` in the folder of the download. Other
            agents' rows ask with the agent's own prompt.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    into: Literal[Product.TASKS, Product.RL]
    parts: tuple[str, ...] = Field(min_length=1)
    name: str | None = Field(default=None, pattern=r"^([A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*$")
    split: str = "train"
    ground_truth: GoldForm = GoldForm.TEXT
    validation: Validation | None = None
    prompts: dict[str, str] = Field(default_factory=dict)


class Preparation(BaseModel):
    """One file that is made.

    Attributes:
        reader: Name of the layout of the rows, see :mod:`afm.datasets.readers`.
        question_key: Where a row of reader ``plain`` holds its question; by default ``question``.
        answer_key: Where it holds its answer; by default ``answer``.
        into: What they become.
        name: Of the file, without its ending, in a folder of the output if it has one (``rl/train``); by default the set's.
        files: Patterns of the files of the set that are read, in the order of their names.
        data_source: Of rows that name none.
        agent: Whose prompt the rows of ``rl`` get.
        ability: Value of the column of that name.
        split: Value of ``extra_info.split``.
        ground_truth: How rows of ``rl`` hold their gold answers.
        validation: Rows of ``rl`` that go to a file of their own.
        published: Rows that were published; another number is told.
        min_tests: Least number of tests of a programming problem that is wanted.
        no_proofs: Leave out problems that ask for a proof, which no gold answer can judge.
        target: So many rows at most, drawn at random with ``seed``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    reader: str
    into: Product
    question_key: str | None = Field(default=None, min_length=1)
    answer_key: str | None = Field(default=None, min_length=1)
    name: str | None = Field(default=None, pattern=r"^([A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*$")
    files: tuple[str, ...] = ("*",)
    data_source: str | None = None
    agent: str = "mhqa"
    ability: str = "qa"
    split: str = "train"
    ground_truth: GoldForm | None = None
    validation: Validation | None = None
    published: int | None = Field(default=None, ge=1)
    min_tests: int | None = Field(default=None, ge=1)
    no_proofs: bool = False
    target: int | None = Field(default=None, ge=1)
    seed: int = 0

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

    @model_validator(mode="after")
    def _held_out_of_rl(self) -> Self:
        if self.validation is not None and self.into is not Product.RL:
            raise ValueError(f"validation: rows are held out of `into: rl`, not of `into: {self.into}`")
        return self

    @model_validator(mode="after")
    def _choice_among_questions(self) -> Self:
        if (self.min_tests or self.no_proofs or self.target) and self.into not in (Product.TASKS, Product.RL):
            raise ValueError(
                f"min_tests, no_proofs and target choose among questions, not rows of {self.into}"
            )
        return self

    def row_reader(self) -> Reader:
        """The reader of the rows, with its keys."""
        from afm.datasets.readers import READERS
        from afm.datasets.readers.own_rows import ANSWER_KEY, QUESTION_KEY, plain_reader

        if self.reader != "plain":
            return READERS[self.reader]
        return plain_reader(self.question_key or QUESTION_KEY, self.answer_key or ANSWER_KEY)
