"""Read data sets row by row into LLaMA-Factory's aligned form, and list the rows that cannot be trained on.

This module reads local JSON and JSONL files line by line. For everything else (hubs, parquet, media), LLaMA-Factory
reads and this module converts. Importing it imports LLaMA-Factory; call
:func:`llamafactory_patch.engine.load_engine` first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from datasets import Dataset, Features, Value
from datasets.exceptions import DatasetGenerationError
from llamafactory.data import loader
from llamafactory.data.parser import DatasetAttr, get_dataset_list

from afm.agents import MODEL_AGENT_FILE, load_agent, shipped_agents
from afm.errors import ConfigError, DataError, RepeatedErrors
from afm.runs.atomic import replace_text
from afm.trajectory.io import BrokenArrayError, json_rows
from llamafactory_patch.conversations import aligned_row
from llamafactory_patch.engine import Arguments
from llamafactory_patch.formats import NOT_KEPT, Converter
from llamafactory_patch.masks import MASKING_REVISION
from llamafactory_patch.prompts import ASKED_COLUMN, PromptState, row_prompts

REPORT_FILE: Final = "bad_rows.jsonl"
ROW_COLUMN: Final = "_row"
"""Column of aligned rows with their source (see :meth:`RowName.dump`)."""
FAULT_COLUMN: Final = "_fault"
"""Column with the reason why a row cannot be trained on (see :meth:`BadRow.dump`), or an empty text."""
_QUESTION_CHARS = 40


@dataclass(frozen=True, slots=True)
class RowName:
    """Source of a row: a file or the name of a data set, and its line and row number, from 1, if known."""

    file: str
    line: int | None = None
    row: int | None = None

    def __str__(self) -> str:
        line = "" if self.line is None else f":{self.line}"
        row = "" if self.row is None or self.file.endswith(".jsonl") else f", row {self.row}"
        return f"{self.file}{line}{row}"

    def dump(self) -> str:
        """Return the name as one text, for a column of the data set."""
        return json.dumps([self.file, self.line, self.row])

    @classmethod
    def load(cls, text: str) -> RowName:
        """Parse the result of :meth:`dump`."""
        return cls(*json.loads(text))


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be trained on; ``question`` is the beginning of its question, to identify it."""

    name: RowName
    reason: str
    question: str = ""

    def __str__(self) -> str:
        asked = f" ({self.question[:_QUESTION_CHARS]!r})" if self.question else ""
        return f"{self.name}{asked}: {self.reason}"

    @property
    def is_fault(self) -> bool:
        """False for a row that a filter dropped."""
        return not self.reason.startswith(NOT_KEPT)

    def dump(self) -> str:
        """Return the row as one text, for a column of the data set."""
        return json.dumps([asdict(self.name), self.reason, self.question], ensure_ascii=False)

    @classmethod
    def load(cls, text: str) -> BadRow:
        """Parse the result of :meth:`dump`."""
        name, reason, question = json.loads(text)
        return cls(RowName(**name), reason, question)

    def as_line(self) -> str:
        """Return the row's line in the report."""
        shown = {**asdict(self.name), "reason": self.reason, "question": self.question[:_QUESTION_CHARS]}
        return json.dumps(shown, ensure_ascii=False) + "\n"


class BadRowReport:
    """Collects the bad rows of a run's data sets.

    Args:
        policy: The setting ``on_bad_rows``.
        path: File that lists the rows, replaced on each start; ``None``: no file.
    """

    def __init__(self, policy: str, path: Path | None = None) -> None:
        self.rows: list[BadRow] = []
        self._policy = policy
        self._path = path
        if path is not None:
            path.unlink(missing_ok=True)

    def add(self, rows: Sequence[BadRow], total: int) -> None:
        """Add bad rows to the report.

        Args:
            total: Number of all rows, including the bad ones.

        Raises:
            DataError: A row has an error and the policy is ``error``, or no row is left.
        """
        self.rows += rows
        if rows and self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._path, "".join(row.as_line() for row in self.rows))
        faults = [row for row in rows if row.is_fault]
        if faults and self._policy == "error":
            raise DataError(self._listed(faults))
        if rows and len(rows) == total:
            raise DataError(f"no row is left; {self._listed(rows)}")
        if rows and self._path is not None:
            kept = len(rows) - len(faults)
            more = f", and {kept} that a filter dropped" if kept else ""
            print(f"bad rows: {len(faults)} left out{more}; listed in {self._path}", file=sys.stderr)

    def sieve(self, dataset: Any) -> Any:
        """Return ``dataset`` without the rows whose ``FAULT_COLUMN`` is not empty; add these to the report.

        Raises:
            DataError: See :meth:`add`.
        """
        if FAULT_COLUMN not in dataset.column_names:
            return dataset
        faults = dataset.select_columns([FAULT_COLUMN]).with_format("arrow")[:].column(0).to_pylist()
        bad = [BadRow.load(fault) for fault in faults if fault]
        self.add(bad, len(faults))
        if bad:
            dataset = dataset.select([number for number, fault in enumerate(faults) if not fault])
        return dataset.remove_columns(FAULT_COLUMN)

    def _listed(self, rows: Sequence[BadRow]) -> str:
        repeats = RepeatedErrors()
        lines = [str(row) for row in rows if repeats.is_new(row.reason)]
        lines += repeats.rest()
        if len(lines) < len(rows) and self._path is not None:
            lines.append(f"all {len(rows):,} are listed in {self._path}")
        return "\n".join(lines)


_TURNS = [{"role": Value("string"), "content": Value("string"), "loss": Value("bool")}]
_COLUMNS = {"_prompt": _TURNS, "_response": _TURNS}
_TEXTS = ("_system", "_tools", ASKED_COLUMN, ROW_COLUMN, FAULT_COLUMN)
_MEDIA = ("_images", "_videos", "_audios")
FEATURES = Features(
    {**_COLUMNS, **dict.fromkeys(_TEXTS, Value("string")), **dict.fromkeys(_MEDIA, Value("null"))}
)
"""Column types of aligned rows from JSON files."""


@dataclass(frozen=True)
class FileState:
    """Identifies a version of a file, for the cache."""

    path: str
    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Return the current state of ``path``."""
        stat = path.stat()
        return cls(str(path), stat.st_size, stat.st_mtime_ns)


def entries(names: Sequence[str] | None, arguments: Arguments) -> list[DatasetAttr]:
    """Return the entries of ``dataset_info.json`` with these names.

    Raises:
        ConfigError: ``dataset_info.json`` is wrong.
    """
    folder = arguments.data.dataset_dir
    try:
        return list(get_dataset_list(list(names or ()), folder))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(f"{folder}/dataset_info.json: {error}") from None


def read_set(attr: DatasetAttr, arguments: Arguments, report: BadRowReport) -> Dataset:
    """Return the valid rows of a data set, limited by ``num_samples`` and ``max_samples``.

    Raises:
        DataError: A whole file is broken, or a row is bad and ``on_bad_rows`` is ``error``.
    """
    files = _json_files(attr, arguments.data)
    if files:
        rows = report.sieve(_read_json(files, attr, arguments))
        return _sampled(rows, attr, arguments.data)
    return report.sieve(_read_other(attr, arguments))


def local_rows(attr: DatasetAttr, arguments: Arguments) -> Iterator[dict[str, Any]] | None:
    """Yield every row of a data set in local JSON files, bad rows included; return ``None`` for other data sets."""
    files = _json_files(attr, arguments.data)
    if not files:
        return None
    states = tuple(FileState.of(file) for file in files)
    return converted_rows(states, _converter(attr, arguments, files[0].parent), ())


def _json_files(attr: DatasetAttr, data_args: Any) -> list[Path]:
    """Return the files of a local data set if this package can read them, otherwise an empty list."""
    if attr.load_from != "file" or attr.images or attr.videos or attr.audios:
        return []
    place = Path(data_args.dataset_dir) / attr.dataset_name
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    return files if all(file.is_file() and file.suffix in (".json", ".jsonl") for file in files) else []


def _read_json(files: list[Path], attr: DatasetAttr, arguments: Arguments) -> Dataset:
    options = {
        "files": tuple(FileState.of(file) for file in files),
        "convert": _converter(attr, arguments, files[0].parent),
        "version": (MASKING_REVISION, *agents_of(attr, files[0].parent, arguments)),
    }
    cache = arguments.model.cache_dir
    try:
        return Dataset.from_generator(converted_rows, features=FEATURES, cache_dir=cache, gen_kwargs=options)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        raise


def _read_other(attr: DatasetAttr, arguments: Arguments) -> Dataset:
    """Let LLaMA-Factory load and sample rows, and convert them here instead of there."""
    align = loader.align_dataset
    loader.align_dataset = lambda dataset, *_: dataset
    try:
        dataset = loader._load_single_dataset(attr, arguments.model, arguments.data, arguments.training)
    finally:
        loader.align_dataset = align
    source = str(attr.dataset_name)
    if attr.load_from == "file":
        source = str(Path(arguments.data.dataset_dir) / source)
    drawn = attr.num_samples is not None  # drawn at random, so the position means nothing
    convert = replace(_converter(attr, arguments, Path(source).parent), from_table=True)
    return dataset.map(
        _NamedConverter(convert, source, drawn),
        with_indices=True,
        remove_columns=list(next(iter(dataset)).keys()),
        num_proc=arguments.data.preprocessing_num_workers,
        load_from_cache_file=not arguments.data.overwrite_cache,
        desc="Converting format of dataset",
    )


def agents_of(attr: DatasetAttr, folder: Path, arguments: Arguments) -> Iterator[str | FileState]:
    """Yield what the prompts of rows depend on in addition to their file and ``prompt``: the agents."""
    if arguments.sft.agent:
        yield load_agent(arguments.sft.agent).digest
    elif attr.formatting == "trajectory":
        yield from (load_agent(name).digest for name in shipped_agents())
        if (own := folder / MODEL_AGENT_FILE).is_file():
            yield FileState.of(own)


def _converter(attr: DatasetAttr, arguments: Arguments, folder: Path) -> Converter:
    data, own = arguments.data, arguments.sft
    places = (str(folder), own.masked_tags, str(data.template), str(data.media_dir))
    return Converter(attr, *places, agent=own.agent or "", prompts=row_prompts(own))


def converted_rows(
    files: tuple[FileState, ...], convert: Converter, version: tuple[object, ...]
) -> Iterator[dict[str, Any]]:
    """Yield every row of ``files``, converted or with the reason why it is not.

    Raises:
        DataError: A whole file is broken, so that rows would be lost, or the files have no rows.
    """
    number = 0
    for file in files:
        for number, (line, item) in enumerate(json_rows(file.path), start=1):
            name = RowName(file.path, line, number)
            if isinstance(item, BrokenArrayError):
                raise item
            if isinstance(item, DataError):
                fault = BadRow(name, item.message).dump()
                yield {
                    **aligned_row([]),
                    ASKED_COLUMN: PromptState.OTHER,
                    ROW_COLUMN: "",
                    FAULT_COLUMN: fault,
                }
            else:
                yield _converted(convert, item, name)
    if not number:
        raise DataError("has no rows", path=files[-1].path)


def _converted(convert: Converter, item: Any, name: RowName) -> dict[str, Any]:
    try:
        return {**convert(item), ROW_COLUMN: name.dump(), FAULT_COLUMN: ""}
    except DataError as error:
        fault = BadRow(name, error.message, _question(item, ("role", convert.attr.role_tag)))
        names = {ROW_COLUMN: name.dump(), FAULT_COLUMN: fault.dump()}
        return {**aligned_row([]), ASKED_COLUMN: PromptState.OTHER, **names}


def _question(item: Any, not_under: tuple[str | None, ...]) -> str:
    """Return the first text of a row that cannot be converted, apart from role names."""
    if isinstance(item, Mapping):
        item = [value for key, value in item.items() if key not in not_under]
    if isinstance(item, list):
        return next(filter(None, (_question(value, not_under) for value in item)), "")
    return item if isinstance(item, str) else ""


def _sampled(dataset: Dataset, attr: DatasetAttr, data_args: Any) -> Dataset:
    """Draw ``num_samples`` rows at random, as LLaMA-Factory does, and then keep the first ``max_samples``."""
    if attr.num_samples is not None:
        drawn = np.random.permutation(len(dataset))[: attr.num_samples]
        again = np.random.choice(len(dataset), attr.num_samples - len(drawn))
        dataset = dataset.select(np.concatenate((drawn, again)))
    if data_args.max_samples is not None:
        dataset = dataset.select(range(min(data_args.max_samples, len(dataset))))
    return dataset


@dataclass(frozen=True)
class _NamedConverter:
    convert: Converter
    source: str
    drawn: bool

    def __call__(self, example: dict[str, Any], index: int) -> dict[str, Any]:
        return _converted(
            self.convert, example, RowName(self.source, None, None if self.drawn else index + 1)
        )
