"""Folders that ``Dataset.save_to_disk`` of the `datasets` library wrote: arrow streams, with a ``state.json`` that names them.

AFM's download scripts leave the published sets in this form. A folder of several splits has ``dataset_dict.json`` and one folder a split.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from afm.datasets.values import batch_rows
from afm.errors import DataError, MissingExtraError

ARROW_SUFFIX = ".arrow"
_STATE, _SPLITS, _INFO = "state.json", "dataset_dict.json", "dataset_info.json"


def is_saved(folder: Path) -> bool:
    """Whether ``folder`` was written by ``save_to_disk``, with or without splits."""
    return (folder / _SPLITS).is_file() or ((folder / _STATE).is_file() and (folder / _INFO).is_file())


def saved_files(folder: Path) -> dict[Path, str]:
    """The arrow files of a saved folder, or of saved folders below it, with the split of each (empty: it has none).

    Raises:
        DataError: A folder that is named there, or a file, is missing; or a description is broken.
    """
    found: dict[Path, str] = {}
    inside: set[Path] = set()
    for place in sorted([folder, *(path for path in folder.rglob("*") if path.is_dir())]):
        if place in inside or not is_saved(place):
            continue
        if (place / _SPLITS).is_file():
            for split in map(_plain_name, _listed(place / _SPLITS, "splits")):
                inside.add(place / split)
                found |= dict.fromkeys(_data_files(place / split), split)
        else:
            found |= dict.fromkeys(_data_files(place), "")
    return found


def hub_name(path: Path, split: str) -> str:
    """What the file would be called on the Hub, for patterns such as ``data/train-*.parquet``."""
    return f"data/{split or path.parent.name}-00000-of-00001.parquet"


def arrow_rows(file: Path) -> Iterator[tuple[int, dict[str, Any] | DataError]]:
    """Rows of an arrow stream, with their numbers from 1.

    Raises:
        DataError: It is no arrow stream, or ends in the middle.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingExtraError("pyarrow", "eval") from error
    number = 0
    try:
        with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as batches:
            for batch in batches:
                for row in batch_rows(batch):
                    number += 1
                    yield number, row
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"no whole arrow stream ({error}); save the set with save_to_disk again", path=str(file)
        ) from None


def _data_files(folder: Path) -> list[Path]:
    listed = _listed(folder / _STATE, "_data_files")
    files = [folder / _plain_name(one.get("filename") if isinstance(one, dict) else one) for one in listed]
    for file in files:
        if not file.is_file():
            raise DataError(
                f"no such file, though {folder / _STATE} names it; save the set again", path=str(file)
            )
    return files


def _listed(path: Path, key: str) -> list[Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))[key]
        if not isinstance(found, list):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"not readable as what save_to_disk writes, expected a list {key!r} ({type(error).__name__}); save the set again",
            path=str(path),
        ) from None
    return found


def _plain_name(name: Any) -> str:
    """A name within its folder, which is all that save_to_disk writes.

    Raises:
        DataError: It is no name, or leads elsewhere.
    """
    if not isinstance(name, str) or not name or name == ".." or Path(name).name != name:
        raise DataError(f"a folder of save_to_disk names {name!r}, expected a name within that folder")
    return name
