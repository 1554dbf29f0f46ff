"""How rows get into LLaMA-Factory's data pipeline: converted one by one, none of them lost without a word.

Local JSON and JSONL files are read here, line by line. Everything else (hubs, parquet, media) is read by
LLaMA-Factory and converted here. Importing this module imports LLaMA-Factory;
:func:`llamafactory_patch.install` does it at the right moment.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, Features, Value
from datasets.exceptions import DatasetGenerationError
from llamafactory.data import loader
from llamafactory.data.parser import DatasetAttr, get_dataset_list

from afm.agents import MODEL_AGENT_FILE, load_agent, shipped_agents
from afm.errors import ConfigError, DataError
from afm.trajectory.io import BrokenArrayError, json_rows
from llamafactory_patch.arguments import MASKING_REVISION, AgentDataArguments
from llamafactory_patch.bad_rows import BadRow, RowName, report
from llamafactory_patch.conversations import aligned_row
from llamafactory_patch.formats import FORMATS, Converter
from llamafactory_patch.prompts import ASKED_COLUMN, Asked, row_prompts

ROW_COLUMN = "_row"
FAULT_COLUMN = "_fault"
"""Why a row cannot be trained on (see :meth:`BadRow.dump`), empty when it can."""

_WITH_FLAGS = (*FORMATS, "sharegpt")
"""Layouts whose turns may say that they are not trained on; LLaMA-Factory's own conversion would lose it."""

_TURNS = [{"role": Value("string"), "content": Value("string"), "loss": Value("bool")}]
_COLUMNS = {"_prompt": _TURNS, "_response": _TURNS}
_TEXTS = ("_system", "_tools", ASKED_COLUMN, ROW_COLUMN, FAULT_COLUMN)
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
    original where nothing of this package is asked for. Its data sets are stored whole or not at all.
    """
    loader.DatasetDict = WholeDatasetDict
    loader._load_single_dataset = _loading(loader._load_single_dataset)
    loader.align_dataset = _aligning(loader.align_dataset)


class WholeDatasetDict(DatasetDict):  # type: ignore[type-arg, unused-ignore]
    """Data sets that a killed process leaves stored completely under their name, or not at all."""

    def save_to_disk(self, dataset_dict_path: Any, *args: Any, **kwargs: Any) -> None:
        """As ``datasets`` does; on this machine's disks under another name first."""
        if "://" in str(dataset_dict_path):
            super().save_to_disk(dataset_dict_path, *args, **kwargs)
            return
        target = Path(dataset_dict_path)
        part = target.with_name(f".{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        super().save_to_disk(part, *args, **kwargs)
        part.replace(target)


def takes_part(data_args: Any) -> bool:
    """Whether the data sets of a training are converted here rather than by LLaMA-Factory.

    Those of one training all are, or none: the two forms cannot be mixed.
    """
    if not isinstance(data_args, AgentDataArguments):
        return False
    if data_args.ignore_observation or data_args.on_bad_rows == "drop" or data_args.prompt != "own":
        return True
    return any(
        attr.formatting in _WITH_FLAGS for attr in (*data_sets(data_args), *evaluation_sets(data_args))
    )


def data_sets(data_args: Any) -> list[DatasetAttr]:
    """The entries of ``dataset_info.json`` that a training is made of.

    Raises:
        ConfigError: ``dataset_info.json`` is wrong.
    """
    return _entries(data_args.dataset, data_args.dataset_dir)


def evaluation_sets(data_args: Any) -> list[DatasetAttr]:
    """The entries that ``eval_dataset`` names.

    Raises:
        ConfigError: ``dataset_info.json`` is wrong.
    """
    return _entries(data_args.eval_dataset, data_args.dataset_dir)


def _entries(names: Sequence[str] | None, folder: str) -> list[DatasetAttr]:
    try:
        return list(get_dataset_list(list(names or ()), folder))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(f"{folder}/dataset_info.json: {error}") from None


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
        for attr, rows in getattr(data_args, "sample", ()):
            if attr == dataset_attr:
                return Dataset.from_list(list(rows), features=_FEATURES)
        if not takes_part(data_args):
            return load(dataset_attr, model_args, data_args, training_args)
        files = _json_files(dataset_attr, data_args)
        if not files and data_args.streaming and dataset_attr.load_from == "file":
            _check_workers(training_args)
        if not files:
            dataset = load(dataset_attr, model_args, data_args, training_args)
            return sieve(dataset, data_args, training_args) if isinstance(dataset, Dataset) else dataset
        dataset = _read(files, dataset_attr, model_args, data_args)
        dataset = _sampled(sieve(dataset, data_args, training_args), dataset_attr, data_args)
        if data_args.streaming:
            return dataset.to_iterable_dataset(num_shards=max(1, training_args.dataloader_num_workers))
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


def _check_workers(training_args: Any) -> None:
    """LLaMA-Factory cuts a streamed file into as many parts as there are workers; of none it reads nothing."""
    if not training_args.dataloader_num_workers:
        raise ConfigError(
            "streaming a file that is neither JSON nor JSONL needs dataloader_num_workers=1 or more, got 0"
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
        "version": (MASKING_REVISION, *agents_of(attr, files[0].parent, data_args)),
    }
    try:
        dataset = Dataset.from_generator(
            converted_rows, features=_FEATURES, cache_dir=model_args.cache_dir, gen_kwargs=given
        )
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        raise
    return dataset


def agents_of(attr: DatasetAttr, folder: Path, data_args: Any) -> Iterator[str | FileState]:
    """What the prompts of rows depend on beside the file itself, and the text of ``prompt``."""
    if data_args.record_agent:
        yield load_agent(data_args.record_agent).digest
    elif attr.formatting == "trajectory":
        yield from (load_agent(name).digest for name in shipped_agents())
        if (own := folder / MODEL_AGENT_FILE).is_file():
            yield FileState.of(own)


def _converter(attr: DatasetAttr, data_args: Any, folder: Path) -> Converter:
    tags = data_args.observation_tags if data_args.ignore_observation else ()
    places = (str(folder), tags, str(data_args.template), str(data_args.media_dir))
    agent = data_args.record_agent or ""
    return Converter(attr, *places, agent=agent, prompts=row_prompts(data_args))


def converted_rows(
    files: tuple[FileState, ...], convert: Converter, version: tuple[object, ...]
) -> Iterator[dict[str, Any]]:
    """Every row of ``files``, converted, or with the reason why it is not.

    Raises:
        DataError: A file as a whole is broken, so that rows would be lost, or there are none.
    """
    number = 0
    for file in files:
        for number, (line, item) in enumerate(json_rows(file.path), start=1):
            name = RowName(file.path, line, number)
            if isinstance(item, BrokenArrayError):
                raise item
            if isinstance(item, DataError):
                fault = BadRow(name, item.message).dump()
                yield {**aligned_row([]), ASKED_COLUMN: Asked.OTHER, ROW_COLUMN: "", FAULT_COLUMN: fault}
            else:
                yield _converted(convert, item, name)
    if not number:
        raise DataError("holds no rows", path=files[-1].path)


def _converted(convert: Converter, item: Any, name: RowName) -> dict[str, Any]:
    try:
        return {**convert(item), ROW_COLUMN: name.dump(), FAULT_COLUMN: ""}
    except DataError as error:
        fault = BadRow(name, error.message, _question(item, ("role", convert.attr.role_tag)))
        names = {ROW_COLUMN: name.dump(), FAULT_COLUMN: fault.dump()}
        return {**aligned_row([]), ASKED_COLUMN: Asked.OTHER, **names}


def _question(item: Any, not_under: tuple[str | None, ...]) -> str:
    """The first text of a row that cannot be converted; what stands under the keys of roles is none."""
    if isinstance(item, Mapping):
        item = [value for key, value in item.items() if key not in not_under]
    if isinstance(item, list):
        return next(filter(None, (_question(value, not_under) for value in item)), "")
    return item if isinstance(item, str) else ""


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
        if not takes_part(data_args):
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
        convert = replace(_converter(dataset_attr, data_args, Path(source).parent), from_table=True)
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
