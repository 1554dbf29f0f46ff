"""Make the files of a project out of downloaded sets, as their YAML says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import TypeVar

from afm.agents import load_agent
from afm.datasets.atomic import replacing
from afm.datasets.download import MANIFEST_FILE
from afm.datasets.hub_sets import HubSet
from afm.datasets.manifest import write_manifest
from afm.datasets.prepare import COLUMNS, register, write_rl
from afm.datasets.published import SUFFIXES, BadRows, ReadCounts, read_published
from afm.datasets.readers.row import AlpacaRow, Conversation, Made
from afm.datasets.schema import Task, write_tasks
from afm.datasets.sources import Preparation, Product
from afm.errors import DataError

_BAD_SUFFIX = ".bad_rows.jsonl"

KindT = TypeVar("KindT", bound=Made)

OnRow = Callable[[str, int], None]
"""Receives the name of what is made, and how many rows have been read for it."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A file that was made.

    Attributes:
        path: The file.
        counts: What became of the rows that were read.
        bad_rows: Where the refused ones stand; ``None`` when there are none.
    """

    path: Path
    counts: ReadCounts
    bad_rows: Path | None


def prepare_set(
    name: str, one: HubSet, data: Path, out: Path, *, strict: bool = False, on_row: OnRow | None = None
) -> Iterator[Prepared]:
    """Make what the YAML says of one set.

    Args:
        data: Folder of the download; the set lies in ``data/name``.
        strict: A bad row is an error; else it stands in ``NAME.bad_rows.jsonl``.

    Raises:
        DataError: A file is missing, a row is bad and ``strict``, or nothing at all could be made.
    """
    for step in one.prepare:
        files = input_files(data / name, step, name)
        yield _prepare(step.name or name, step, files, out, _commit(data, name), strict=strict, on_row=on_row)


def make(
    label: str,
    step: Preparation,
    files: list[Path],
    out: Path,
    *,
    strict: bool = False,
    on_row: OnRow | None = None,
) -> Prepared:
    """Make one file of published files, wherever they are from.

    Raises:
        DataError: As :func:`prepare_set`.
    """
    return _prepare(label, step, files, out, None, strict=strict, on_row=on_row)


def input_files(folder: Path, step: Preparation, name: str) -> list[Path]:
    """The files of a set that a step reads, by name.

    Raises:
        DataError: There are none.
    """
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in SUFFIXES
        and path.is_file()
        and any(fnmatchcase(path.relative_to(folder).as_posix(), pattern) for pattern in step.files)
    )
    if not found:
        raise DataError(
            f"no file that matches {', '.join(step.files)}; `afm data download` fetches set {name!r}",
            path=str(folder),
        )
    return found


def _prepare(
    label: str,
    step: Preparation,
    files: list[Path],
    out: Path,
    commit: str | None,
    *,
    strict: bool,
    on_row: OnRow | None,
) -> Prepared:
    counts, listing = ReadCounts(), out / f"{label}{_BAD_SUFFIX}"
    with ExitStack() as stack:
        notes = stack.enter_context(replacing(listing))
        with notes.open("w", encoding="utf-8") as sink:
            made = read_published(
                files,
                step.row_reader(),
                BadRows(sink, strict=strict),
                counts,
                label=label,
                data_source=step.data_source,
                on_row=None if on_row is None else lambda rows: on_row(label, rows),
            )
            path = _write(made, label, step, out, files)
    if not counts.bad:
        listing.unlink()
    if not counts.made:
        path.unlink(missing_ok=True)
        reasons = "; ".join(f"{count} {reason}" for reason, count in counts.refused.most_common(3))
        where = ", ".join(map(str, files))
        raise DataError(f"no row of {where} fits reader {step.reader!r}: {reasons or 'there are none'}")
    write_manifest(
        out / f"{label}.manifest.json",
        counts=counts.as_counts(),
        inputs=files,
        made=path.name,
        reader=step.reader,
        commit=commit,
        refused=dict(counts.refused),
    )
    return Prepared(path, counts, listing if counts.bad else None)


def _write(made: Iterable[Made], label: str, step: Preparation, out: Path, files: list[Path]) -> Path:
    match step.into:
        case Product.TASKS:
            path = out / f"{label}.jsonl"
            write_tasks(_of(made, Task, step), path)
        case Product.RL:
            path = out / f"{label}.parquet"
            tasks = _of(made, Task, step)
            for first in tasks:
                write_rl(
                    chain([first], tasks),
                    load_agent(step.agent),
                    path,
                    split=step.split,
                    ability=step.ability,
                    gold=step.ground_truth,
                    inputs=files,
                )
        case Product.SFT:
            path = out / f"{label}.json"
            _write_alpaca(_of(made, AlpacaRow, step), path, label)
        case Product.CHAT:
            path = out / f"{label}.jsonl"
            _write_chat(_of(made, Conversation, step), path)
    return path


def _of(made: Iterable[Made], kind: type[KindT], step: Preparation) -> Iterator[KindT]:
    for one in made:
        if not isinstance(one, kind):
            raise DataError(
                f"reader {step.reader!r} makes rows of kind {type(one).__name__}, which cannot become {step.into}"
            )
        yield one


def _write_alpaca(rows: Iterable[AlpacaRow], path: Path, name: str) -> None:
    """One JSON array, and its entry in ``dataset_info.json``."""
    begun, with_system = False, False
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(",\n" if begun else "[\n")
            file.write(json.dumps(row.model_dump(exclude_none=True), ensure_ascii=False))
            begun, with_system = True, with_system or row.system is not None
        file.write("\n]\n" if begun else "[]\n")
    if begun:
        register(path.parent, name, path.name, {**COLUMNS, **({"system": "system"} if with_system else {})})


def _write_chat(rows: Iterable[Conversation], path: Path) -> None:
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(row.model_dump_json(exclude_none=True) + "\n")


def _commit(data: Path, name: str) -> str | None:
    """The commit that a set was fetched at, as the download noted it."""
    try:
        noted = json.loads((data / MANIFEST_FILE).read_text(encoding="utf-8"))["sets"][name]["commit"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(noted)
