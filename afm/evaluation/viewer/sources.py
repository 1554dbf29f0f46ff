"""Which files of a folder hold episodes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from afm.errors import DataError

_MAX_FIRST_LINE = 64 << 20
_KEYS = {"id", "agent", "segments"}


def episode_files(path: Path) -> list[Path]:
    """The file itself, or every JSONL file below a folder that begins with an episode, sorted by path.

    Raises:
        DataError: ``path`` is a file and holds no episodes, or there is no such path.
    """
    if path.is_dir():
        return sorted(file for file in _below(path) if _begins_with_episode(file))
    if not path.exists():
        raise DataError(
            "no such file or folder; expected episodes as JSONL, or a run's folder", path=str(path)
        )
    if path.stat().st_size and not _begins_with_episode(path):
        raise DataError(
            "its first line is no episode; expected trajectory JSONL (`afm convert` reads other formats)",
            path=str(path),
            line=1,
        )
    return [path]


def _below(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in names if name.endswith(".jsonl"))


def _begins_with_episode(file: Path) -> bool:
    try:
        with file.open("rb") as lines:
            row = json.loads(lines.readline(_MAX_FIRST_LINE))
    except (OSError, ValueError):
        return False
    return isinstance(row, dict) and row.keys() >= _KEYS
