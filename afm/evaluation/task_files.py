"""Files of questions in any layout: ours, the published evaluation files of AFM, or a benchmark as its owner publishes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from afm.datasets import Task, task_of_row
from afm.datasets.published import SUFFIXES, data_files, published_rows, rows_of
from afm.datasets.readers import READERS
from afm.errors import DataError

_OUR_KEYS = frozenset({"ground_truth", "data_source", "prompt", "reward_model"})
"""A row with one of them is a task, a raw question or an RL row, whichever benchmark it is of."""


def task_files(place: Path) -> list[Path]:
    """The file itself, or all files of a folder that can hold rows, by name.

    Raises:
        DataError: There is nothing.
    """
    if not place.is_dir():
        return [place]
    rows = [path for path in data_files(place) if not path.name.endswith((".manifest.json", ".lock.json"))]
    if not rows:
        raise DataError(f"holds no file of questions; expected {', '.join(SUFFIXES)}", path=str(place))
    return rows


def read_benchmark(
    file: Path, *, reader: str | None = None, data_source: str | None = None
) -> Iterator[Task]:
    """Stream the questions of one file.

    Args:
        reader: Name of the owner's layout (see :mod:`afm.datasets.readers`), for rows that are in no layout of ours.
        data_source: Of rows that name none; chooses the reward.

    Raises:
        DataError: At the first bad row, with file and line (parquet: row, counted from 1).
    """
    seen: set[str] = set()
    rows = published_rows(file) if reader is None else rows_of(file, READERS[reader])
    for number, row in rows:
        try:
            task = _task(row, f"{file.stem}-{number}", reader, data_source)
            if task.id in seen:
                raise DataError(f"id {task.id!r} was used by an earlier row; ids must be unique")
        except DataError as error:
            raise DataError(error.message, path=str(file), line=number) from None
        seen.add(task.id)
        yield task


def _task(row: Any, default: str, reader: str | None, data_source: str | None) -> Task:
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, Mapping):
        raise DataError(f"expected an object, got {type(row).__name__}")
    if reader is None or _OUR_KEYS & row.keys():
        return task_of_row(row, default_id=default, data_source=data_source)
    try:
        task = READERS[reader].read(row, default)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DataError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except DataError as error:
        raise DataError(
            f"reader {reader!r}: {error.message}. `afm data prepare tasks FILE --reader {reader} -o TASKS.jsonl` leaves "
            "such rows out and lists them"
        ) from None
    if not isinstance(task, Task):
        raise DataError(f"reader {reader!r} makes rows of kind {type(task).__name__}, not questions")
    return task if task.data_source else task.model_copy(update={"data_source": data_source or ""})
