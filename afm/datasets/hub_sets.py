"""The data sets and models that a project downloads from the Hub: a YAML that names them, and a lock that pins them.

The YAML names repositories and files, and the files to prepare from them. The lock, by default next to the files,
records commit, size and checksum of every file, so that another machine gets the same bytes or an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from afm.choices import GoldForm
from afm.configuration import Settings, read_file, validated
from afm.datasets.hub import HubFile, RepositoryKind, checked_name, is_commit
from afm.datasets.published import PublishedPrompt
from afm.datasets.readers import READERS, checked_reader
from afm.datasets.readers.questions import plain_rows
from afm.datasets.readers.row import RowReader
from afm.errors import DataError, UsageError, first_fault, suggestion
from afm.runs.atomic import replace_text

LOCK_FILE = "download.lock.json"
_SHARD = re.compile(r"-\d+-of-\d+$")
_FILE_NAME = r"^([A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*$"
"""A file name without its suffix, optionally in a folder."""


def split_of(name: str) -> str:
    """Return the split of a repository's file by its path: ``train`` for ``data/train-00000-of-00002.parquet``."""
    path = Path(name)
    return path.with_name(_SHARD.sub("", path.stem)).as_posix().removeprefix("data/")


class Product(StrEnum):
    """Kinds of files to prepare from published rows."""

    TASKS = "tasks"
    """JSONL of questions with gold answers: for `afm data distill`, `afm data queries`, `afm eval`."""
    RL = "rl"
    """Parquet for `afm rl`."""
    SFT = "sft"
    """Alpaca JSON for `afm sft`, with its entry in ``dataset_info.json``."""
    CHAT = "chat"
    """JSONL of ``{messages}``, every message with its role, for `afm convert` and `afm data negative`. If every message
    says whether it is trained on, it is also for `afm sft`, with an entry in ``dataset_info.json``."""


class Validation(Settings):
    """Questions to hold out of training, in a file of that name next to the training rows."""

    rows: int = Field(ge=1)
    """Number of questions, at most a tenth of the set. Those whose text has the smallest hash are held out, so a row
    keeps its place when the set grows, and rows of one question stay together."""
    seed: int = 0
    name: str = Field(default="val", pattern=r"^[A-Za-z0-9_][\w.-]*$")
    any_numbers: bool = False
    """Whether texts that differ only in their numbers are one question, for word problems that are published several
    times with other numbers."""


class Mix(Settings):
    """One file with rows of several sets."""

    into: Literal[Product.TASKS, Product.RL]
    parts: tuple[str, ...] = Field(min_length=1)
    """Names of preparations, in the order of the rows. Reader, files and selection are those of the preparation,
    regardless of its own ``into``."""
    name: str | None = Field(default=None, pattern=_FILE_NAME)
    split: str = "train"
    """Value of ``extra_info.split`` in rows of ``rl``."""
    ground_truth: GoldForm = GoldForm.TEXT
    validation: Validation | None = None
    prompts: dict[str, str] = Field(default_factory=dict)
    """Prompts of ``rl`` rows by agent: files with ``{question}`` in the folder of the download. Rows of other agents
    use the agent's own prompt."""


class Preparation(Settings):
    """One file to prepare."""

    reader: Annotated[str, AfterValidator(checked_reader)]
    """Name of the rows' layout, see :mod:`afm.datasets.readers`."""
    into: Product
    question_key: str | None = Field(default=None, min_length=1)
    answer_key: str | None = Field(default=None, min_length=1)
    """Keys of question and answer for reader ``plain``. By default ``question`` and ``answer``."""
    name: str | None = Field(default=None, pattern=_FILE_NAME)
    """Name of the file without its suffix, optionally in a folder of the output (``rl/train``). By default the set's
    name."""
    files: tuple[str, ...] = ("*",)
    """Patterns of the set's files to read, in the order of their names."""
    data_source: str | None = None
    """Data source of rows without one."""
    agent: str = "mhqa"
    """Agent whose prompt the rows of ``rl`` get."""
    ability: str = "qa"
    """Value of the column ``ability``."""
    split: str = "train"
    ground_truth: GoldForm | None = None
    validation: Validation | None = None
    published: int | None = Field(default=None, ge=1)
    """Number of published rows. A different number is reported."""
    min_tests: int | None = Field(default=None, ge=1)
    """Minimum number of tests of a programming problem."""
    max_steps: int | None = Field(default=None, ge=1)
    """Maximum number of operations in the program of a word problem. A problem without a program is left out."""
    no_proofs: bool = False
    """Whether to leave out problems that ask for a proof, which no gold answer can judge."""
    target: int | None = Field(default=None, ge=1)
    """Maximum number of rows, drawn at random with ``seed``."""
    seed: int = 0

    @model_validator(mode="after")
    def _fits_the_product(self) -> Self:
        if self.reader != "plain" and (self.question_key or self.answer_key):
            raise ValueError(
                f"reader {self.reader!r} knows its keys; question_key and answer_key go with reader 'plain'"
            )
        if self.into in (Product.TASKS, Product.RL):
            return self
        if self.validation is not None:
            raise ValueError(
                f"validation: questions are held out of tasks and rl, not of `into: {self.into}`"
            )
        if self.min_tests or self.max_steps or self.no_proofs or self.target:
            raise ValueError(
                f"min_tests, max_steps, no_proofs and target choose among questions, not rows of {self.into}"
            )
        return self

    def row_reader(self) -> RowReader:
        """Return the reader of the rows with its keys."""
        if self.reader != "plain":
            return READERS[self.reader]
        return RowReader(plain_rows(self.question_key, self.answer_key))


class LockedFile(Settings):
    """A file with its required size and checksum."""

    name: str
    size: int = Field(ge=0)
    checksum: str


class HubSet(Settings):
    """One data set or model, or files of a repository on GitHub."""

    repository: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    kind: RepositoryKind = RepositoryKind.DATASET
    revision: str | None = None
    """Branch, tag or commit. By default the main branch."""
    files: tuple[str, ...] = ("*",)
    """Shell patterns of the paths to download. ``*`` also matches folders."""
    pinned: tuple[LockedFile, ...] = ()
    """Files of a set on GitHub, which publishes no checksums: path, size, SHA-256. ``revision`` must be a commit."""
    optional: bool = False
    """Whether to download the set only by name, because it is very large or the recipe does not need it."""
    prepare: tuple[Preparation, ...] = ()
    prompts: tuple[PublishedPrompt, ...] = ()

    @field_validator("pinned")
    @classmethod
    def _within_the_folder(cls, value: tuple[LockedFile, ...]) -> tuple[LockedFile, ...]:
        for file in value:
            try:
                checked_name("pinned", file.name)
            except DataError as error:
                raise ValueError(error.message) from None
            if len(file.checksum) != 64 or set(file.checksum) - set("0123456789abcdef"):
                raise ValueError(
                    f"{file.name}: expected a SHA-256 of 64 hexadecimal digits, got {file.checksum}"
                )
        return value

    @model_validator(mode="after")
    def _pinned_on_github(self) -> Self:
        on_github = self.kind is RepositoryKind.GITHUB
        if on_github and not (is_commit(self.revision) and self.pinned):
            raise ValueError(
                "a set of kind github needs `revision` (a whole commit) and `pinned` (name, size, checksum)"
            )
        if self.pinned and not on_github:
            raise ValueError("`pinned` goes with kind github; sets of the Hub are pinned by a lock (--pin)")
        return self

    def pinned_files(self) -> tuple[HubFile, ...]:
        """Return the files that the YAML itself pins. Empty for a set of the Hub."""
        return tuple(
            HubFile(self.repository, file.name, file.size, file.checksum, self.revision or "", self.kind)
            for file in self.pinned
            if self.wants(file.name)
        )

    def wants(self, name: str) -> bool:
        """Return whether a file of the repository matches ``files``."""
        return any(fnmatchcase(name, pattern) for pattern in self.files)


class HubSets(Settings):
    """A YAML of sets and mixes of them, by name. A set's name is also its folder."""

    sets: dict[str, HubSet] = Field(min_length=1)
    mixes: dict[str, Mix] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _known_parts(self) -> Self:
        known = self.preparations
        for name, mix in self.mixes.items():
            for part in mix.parts:
                if part not in known:
                    raise ValueError(
                        f"mixes.{name}: nothing is prepared as {part!r}; {suggestion(part, known)}"
                    )
                into = known[part][1].into
                if into not in (Product.TASKS, Product.RL):
                    raise ValueError(f"mixes.{name}: {part!r} is made into {into}, not into questions")
        return self

    @property
    def preparations(self) -> dict[str, tuple[str, Preparation]]:
        """All preparations by name, each with its set."""
        return {
            step.name or name: (name, step) for name, hub_set in self.sets.items() for step in hub_set.prepare
        }

    def mix(self, name: str) -> Mix:
        """Return the mix of that name."""
        if name not in self.mixes:
            known = suggestion(name, self.mixes) if self.mixes else "the file has no `mixes`"
            raise UsageError(f"{name}: no such mix; {known}")
        return self.mixes[name]

    def chosen(self, names: list[str], *, everything: bool = False) -> dict[str, HubSet]:
        """Return the sets of these names, or without names all that are not optional."""
        for name in names:
            if name not in self.sets:
                raise UsageError(f"--only {name}: no such set; {suggestion(name, self.sets)}")
        if names:
            return {name: self.sets[name] for name in self.sets if name in names}
        chosen = {name: hub_set for name, hub_set in self.sets.items() if everything or not hub_set.optional}
        if not chosen:
            raise UsageError(f"choose sets with --only NAME, or --all: {', '.join(self.sets)}")
        return chosen


def read_hub_sets(path: Path) -> HubSets:
    """Read a YAML of sets."""
    return validated(HubSets, read_file(path, "data sets"), str(path))


class LockedSet(Settings):
    """A pinned set."""

    repository: str
    kind: RepositoryKind
    revision: str | None
    patterns: tuple[str, ...]
    """The YAML's ``revision`` and ``files``."""
    commit: str
    """Commit of the revision when it was pinned."""
    files: tuple[LockedFile, ...]
    rows: dict[str, int] = Field(default_factory=dict)
    """Rows by split, as counted when the set was first prepared. Empty before that."""

    @classmethod
    def of(cls, wanted: HubSet, files: tuple[HubFile, ...]) -> LockedSet:
        """Pin a set at its current files."""
        return cls(
            repository=wanted.repository,
            kind=wanted.kind,
            revision=wanted.revision,
            patterns=wanted.files,
            commit=files[0].revision,
            files=tuple(LockedFile(name=file.name, size=file.size, checksum=file.checksum) for file in files),
        )

    def hub_files(self) -> tuple[HubFile, ...]:
        """Return the files at the pinned commit."""
        return tuple(
            HubFile(self.repository, file.name, file.size, file.checksum, self.commit, self.kind)
            for file in self.files
        )

    def check(self, name: str, wanted: HubSet, lock: Path) -> None:
        """Raise an error if the YAML asks for something else."""
        commit = wanted.revision if is_commit(wanted.revision) else self.commit
        pairs = (
            ("commit", self.commit, commit),
            ("repository", self.repository, wanted.repository),
            ("kind", self.kind.value, wanted.kind.value),
            ("revision", self.revision, wanted.revision),
            ("files", list(self.patterns), list(wanted.files)),
        )
        for key, locked, asked in pairs:
            if locked != asked:
                raise DataError(
                    f"set {name!r} is pinned to {key} {locked}, but the YAML asks for {asked}; undo the change, or pin it "
                    "again with --pin",
                    path=str(lock),
                )

    def counted(self, name: str, rows: Mapping[str, int], lock: Path) -> LockedSet:
        """Return the set with the given counts of rows by split. A count that differs from the lock is an error."""
        for split, count in rows.items():
            if (before := self.rows.get(split, count)) != count:
                raise DataError(
                    f"set {name!r}, split {split!r}: {count:,} rows, but {before:,} when it was first prepared. If the change "
                    f"is intended, prepare it again with --new-counts. If not, download the files again",
                    path=str(lock),
                )
        return self.model_copy(update={"rows": {**self.rows, **rows}})


class Lock(Settings):
    """The pinned sets, by name."""

    version: int = Field(default=1, ge=1, le=1)
    sets: dict[str, LockedSet] = Field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Replace the file."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False)
        replace_text(path, text + "\n")


def read_lock(path: Path) -> Lock:
    """Read the lock in a file. Without a file the lock is empty."""
    if not path.exists():
        return Lock()
    try:
        return Lock.model_validate_json(path.read_bytes())
    except ValidationError as error:
        fault = f"not a lock of downloads: {first_fault(error, 'file')}; remove or restore the file"
        raise DataError(fault, path=str(path)) from None
