"""LiveCodeBench's own files, found by problem: rows for training and evaluation often hold the sample tests only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from afm.errors import DataError
from afm.rewards.code_tests.problem import question_id

TEST_KEYS = ("public_test_cases", "private_test_cases", "metadata")
"""Of a row as its owner publishes it."""

_ID = re.compile(rb'"question_id"\s*:\s*"([^"\\]*)"')


class PrivateTests:
    """Rows of LiveCodeBench's JSONL files by their ``question_id``; only their positions are kept in memory.

    The files are the owner's, what `afm data livecodebench` makes of them, or prepared tasks.

    Args:
        path: A file, or a folder of ``*.jsonl`` files; of a problem in several files the last one counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._places: dict[str, tuple[Path, int]] | None = None

    def __contains__(self, question_id: str) -> bool:
        return question_id in self._found()

    def row(self, question_id: str) -> dict[str, Any] | None:
        """The row of a problem, ``None`` when the files lack it. Blocks: for threads.

        Raises:
            DataError: There are no such files, or the row is damaged.
        """
        place = self._found().get(question_id)
        if place is None:
            return None
        path, position = place
        with path.open("rb") as file:
            file.seek(position)
            try:
                row = json.loads(file.readline())
            except ValueError as error:
                raise DataError(f"problem {question_id!r}: damaged row ({error})", path=str(path)) from None
        if not isinstance(row, dict):
            raise DataError(f"problem {question_id!r}: expected an object", path=str(path))
        tests = row.get("ground_truth", row)
        return tests if isinstance(tests, dict) else row

    def _found(self) -> dict[str, tuple[Path, int]]:
        with self._lock:
            if self._places is None:
                self._places = self._scanned()
            return self._places

    def _scanned(self) -> dict[str, tuple[Path, int]]:
        files = sorted(self._path.glob("*.jsonl")) if self._path.is_dir() else [self._path]
        if not files or not files[0].is_file():
            raise DataError(f"no LiveCodeBench files; {_next_step(self._path)}", path=str(self._path))
        places: dict[str, tuple[Path, int]] = {}
        for path in files:
            position = 0
            with path.open("rb") as file:
                for line in file:
                    if match := _ID.search(line):
                        places[match[1].decode()] = (path, position)
                    position += len(line)
        return places


def _next_step(path: Path) -> str:
    fetch = (
        "afm data download benchmarks --out downloads/benchmarks --only livecodebench_v5, then "
        "afm data livecodebench downloads/benchmarks/livecodebench_v5 --out FOLDER"
    )
    if path.is_dir() and any(path.glob("*.pkl")):
        return (
            "got AFM's .pkl files, which are not read: loading a pickle runs whatever is in it. Make a folder of the "
            f"owner's rows instead: {fetch}"
        )
    return f"expected a .jsonl file or a folder of them: {fetch}"


def without_complete_tests(ground_truths: Iterable[Any], path: Path | None) -> int:
    """How many problems would be judged by sample tests: neither their rows nor ``path`` have the private ones.

    Raises:
        DataError: ``path`` holds no files of LiveCodeBench.
    """
    store = PrivateTests(path) if path is not None else None
    return sum(not _is_complete(truth, store) for truth in ground_truths)


def _is_complete(truth: Any, store: PrivateTests | None) -> bool:
    if isinstance(truth, Mapping) and truth.get("private_test_cases"):
        return True
    name = question_id(truth)
    return store is not None and name is not None and name in store
