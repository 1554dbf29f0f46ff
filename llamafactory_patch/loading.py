"""How rows get into LLaMA-Factory's data pipeline: converted one by one, none of them lost without a word.

Local JSON and JSONL files are read here, line by line. Everything else (hubs, parquet, media) is read by
LLaMA-Factory and converted here. Importing this module imports LLaMA-Factory;
:func:`llamafactory_patch.install` does it at the right moment.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value
from datasets.exceptions import DatasetGenerationError
from llamafactory.data import loader
from llamafactory.data.parser import DatasetAttr

from afm.agents import MODEL_AGENT_FILE, load_agent, shipped_agents
from afm.errors import DataError
from afm.trajectory.rows import json_rows
from llamafactory_patch.arguments import MASKING_REVISION, AgentDataArguments
from llamafactory_patch.bad_rows import BadRow, RowName, report
from llamafactory_patch.formats import FORMATS, Converter
from llamafactory_patch.messages import aligned_row

ROW_COLUMN = "_row"
FAULT_COLUMN = "_fault"
"""Why a row cannot be trained on (see :meth:`BadRow.dump`), empty when it can."""

_TURNS = [{"role": Value("string"), "content": Value("string"), "loss": Value("bool")}]
_COLUMNS = {"_prompt": _TURNS, "_response": _TURNS}
_TEXTS = ("_system", "_tools", ROW_COLUMN, FAULT_COLUMN)
_MEDIA = ("_images", "_videos", "_audios")
_FEATURES = Features(
    {**_COLUMNS, **dict.fromkeys(_TEXTS, Value("string")), **dict.fromkeys(_MEDIA, Value("null"))}
)


@dataclass(frozen=True)
class FileState:
    """Tells a file from what it was before it was changed, for the cache."""

    path: str
    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """The state of ``path`` now."""
        stat = path.stat()
        return cls(str(path), stat.st_size, stat.st_mtime_ns)


def install_loading() -> None:
    """Put our reader and converter into LLaMA-Factory's data loader (0.9.5, data/loader.py).

    Two functions of that module are replaced, since it has no registry for them; both hand on to the
    original where nothing of this package is asked for.
    """
    loader._load_single_dataset = _loading(loader._load_single_dataset)
    loader.align_dataset = _aligning(loader.align_dataset)


def takes_part(data_args: Any, attr: DatasetAttr) -> bool:
    """Whether a data set is converted here rather than by LLaMA-Factory."""
    return isinstance(data_args, AgentDataArguments) and (
        data_args.ignore_observation or data_args.on_bad_rows == "drop" or attr.formatting in FORMATS
    )


def sieve(dataset: Any, data_args: Any, training_args: Any) -> Any:
    """``dataset`` without its bad rows, which are reported.

    Raises:
        DataError: See :func:`llamafactory_patch.bad_rows.report`.
    """
    faults = dataset.select_columns([FAULT_COLUMN]).with_format("arrow")[:].column(0).to_pylist()
    bad = [BadRow.load(fault) for fault in faults if fault]
    report(bad, len(faults), data_args, training_args)
    if bad:
        dataset = dataset.select([number for number, fault in enumerate(faults) if not fault])
    return dataset.remove_columns(FAULT_COLUMN)


def _loading(load: Any) -> Any:
    @functools.wraps(load)
    def load_with_names(dataset_attr: Any, model_args: Any, data_args: Any, training_args: Any) -> Any:
        if not takes_part(data_args, dataset_attr):
            return load(dataset_attr, model_args, data_args, training_args)
        files = _json_files(dataset_attr, data_args)
        if not files:
            dataset = load(dataset_attr, model_args, data_args, training_args)
            return sieve(dataset, data_args, training_args) if isinstance(dataset, Dataset) else dataset
        dataset = _read(files, dataset_attr, model_args, data_args)
        dataset = _sampled(sieve(dataset, data_args, training_args), dataset_attr, data_args)
        if data_args.streaming:
            return dataset.to_iterable_dataset(num_shards=training_args.dataloader_num_workers)
        return dataset

    return load_with_names


def local_rows(attr: DatasetAttr, data_args: Any) -> Iterator[dict[str, Any]] | None:
    """Every row of a data set in local JSON files as a training reads it, faults included; ``None`` for others."""
    files = _json_files(attr, data_args)
    if not files:
        return None
    return converted_rows(
        tuple(FileState.of(file) for file in files), _converter(attr, data_args, files[0].parent), ()
    )


def _json_files(attr: DatasetAttr, data_args: Any) -> list[Path]:
    """The files of a local data set if this package can read them, else none."""
    if attr.load_from != "file" or attr.images or attr.videos or attr.audios:
        return []
    place = Path(data_args.dataset_dir) / attr.dataset_name
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    return files if all(file.is_file() and file.suffix in (".json", ".jsonl") for file in files) else []


def _read(files: list[Path], attr: DatasetAttr, model_args: Any, data_args: Any) -> Dataset:
    given = {
        "files": tuple(FileState.of(file) for file in files),
        "convert": _converter(attr, data_args, files[0].parent),
        "version": (MASKING_REVISION, *_agents(attr, files[0].parent)),
    }
    try:
        dataset = Dataset.from_generator(
            converted_rows, features=_FEATURES, cache_dir=model_args.cache_dir, gen_kwargs=given
        )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        raise
    if not len(dataset):
        raise DataError("holds no rows", path=str(files[0]))
    return dataset


def _agents(attr: DatasetAttr, folder: Path) -> Iterator[str | FileState]:
    """What the questions of records depend on beside the file itself."""
    if attr.formatting == "trajectory":
        yield from (load_agent(name).digest for name in shipped_agents())
        if (own := folder / MODEL_AGENT_FILE).is_file():
            yield FileState.of(own)


def _converter(attr: DatasetAttr, data_args: Any, folder: Path) -> Converter:
    tags = data_args.observation_tags if data_args.ignore_observation else ()
    return Converter(attr, str(folder), tags, str(data_args.template), str(data_args.media_dir))


def converted_rows(
    files: tuple[FileState, ...], convert: Converter, version: tuple[object, ...]
) -> Iterator[dict[str, Any]]:
    """Every row of ``files``, converted, or with the reason why it is not.

    Raises:
        DataError: A file as a whole is broken, so that rows would be lost.
    """
    for file in files:
        for number, (line, item) in enumerate(json_rows(file.path), start=1):
            name = RowName(file.path, line, number)
            if isinstance(item, DataError) and _is_array(file.path):
                raise item
            if isinstance(item, DataError):
                yield {**aligned_row([]), ROW_COLUMN: "", FAULT_COLUMN: BadRow(name, item.message).dump()}
            else:
                yield _converted(convert, item, name)


def _is_array(path: str) -> bool:
    with Path(path).open("rb") as file:
        return file.readline().lstrip().startswith(b"[")


def _converted(convert: Converter, item: Any, name: RowName) -> dict[str, Any]:
    try:
        return {**convert(item), ROW_COLUMN: name.dump(), FAULT_COLUMN: ""}
    except DataError as error:
        fault = BadRow(name, error.message, _question(item))
        return {**aligned_row([]), ROW_COLUMN: name.dump(), FAULT_COLUMN: fault.dump()}


def _question(item: Any) -> str:
    """The first text of a row that cannot be converted."""
    values = item.values() if isinstance(item, Mapping) else item if isinstance(item, list) else ()
    for value in values:
        if isinstance(value, str) and value:
            return value
        if found := _question(value):
            return found
    return ""


def _sampled(dataset: Dataset, attr: DatasetAttr, data_args: Any) -> Dataset:
    """As many rows as asked for: ``num_samples`` drawn at random (as LLaMA-Factory does), then ``max_samples``."""
    if attr.num_samples is not None and not data_args.streaming:
        drawn = np.random.permutation(len(dataset))[: attr.num_samples]
        again = np.random.choice(len(dataset), attr.num_samples - len(drawn))
        dataset = dataset.select(np.concatenate((drawn, again)))
    if data_args.max_samples is not None:
        dataset = dataset.select(range(min(data_args.max_samples, len(dataset))))
    return dataset


def _aligning(align: Any) -> Any:
    @functools.wraps(align)
    def align_with_names(dataset: Any, dataset_attr: Any, data_args: Any, training_args: Any) -> Any:
        if not takes_part(data_args, dataset_attr):
            return align(dataset, dataset_attr, data_args, training_args)
        options: dict[str, Any] = {}
        if not data_args.streaming:
            options = {
                "num_proc": data_args.preprocessing_num_workers,
                "load_from_cache_file": not data_args.overwrite_cache
                or training_args.local_process_index != 0,
                "desc": "Converting format of dataset",
            }
        columns = list(next(iter(dataset)).keys())
        source = dataset_attr.dataset_name
        if dataset_attr.load_from == "file":
            source = str(Path(data_args.dataset_dir) / source)
        drawn = dataset_attr.num_samples is not None  # at random: the position tells nothing
        convert = _converter(dataset_attr, data_args, Path(source).parent)
        return dataset.map(
            _NamedConverter(convert, source, drawn), with_indices=True, remove_columns=columns, **options
        )

    return align_with_names


@dataclass(frozen=True)
class _NamedConverter:
    convert: Converter
    source: str
    drawn: bool

    def __call__(self, example: dict[str, Any], index: int) -> dict[str, Any]:
        return _converted(
            self.convert, example, RowName(self.source, None, None if self.drawn else index + 1)
        )
