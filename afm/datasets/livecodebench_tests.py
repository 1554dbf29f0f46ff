"""A folder of LiveCodeBench's complete tests, which LIVECODEBENCH_DATA_PATH names, from the owner's files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from afm.datasets.published import published_rows
from afm.datasets.readers.programs import checked_tests
from afm.errors import DataError
from afm.rewards.code_tests.problem import TEST_KEYS
from afm.runs.atomic import replacing
from afm.runs.folder import write_manifest

TESTS_FILE = "livecodebench_tests.jsonl"
_SUFFIXES = (".jsonl", ".parquet")


def owners_files(places: Sequence[Path]) -> list[Path]:
    """The files of rows among ``places`` and in the folders among them, at least one, by name."""
    files = [
        file
        for place in places
        for file in (sorted(place.rglob("*")) if place.is_dir() else [place])
        if file.suffix in _SUFFIXES
    ]
    if not files:
        raise DataError(
            "holds no file of LiveCodeBench; expected test.jsonl, test2.jsonl .. of livecodebench/code_generation_lite: "
            "afm data download benchmarks --out downloads/benchmarks --only livecodebench_v5",
            path=", ".join(map(str, places)),
        )
    return files


def write_complete_tests(places: Sequence[Path], out: Path) -> int:
    """Write the tests of every problem into ``out``, a line each, once the reward has read them; all or nothing.

    Private tests stay packed, as published, and are never unpickled. Of a problem in several files the last one counts.

    Returns:
        The number of problems.

    Raises:
        DataError: A row has no private tests, or damaged ones; with file and line.
    """
    files = owners_files(places)
    last = {name: (file, line) for file, line, name, _ in _problems(files)}
    out.mkdir(parents=True, exist_ok=True)
    with replacing(out / TESTS_FILE) as temporary, temporary.open("w", encoding="utf-8") as lines:
        for file, line, name, tests in _problems(files):
            if last[name] == (file, line):
                checked = _check(tests, file, line)
                lines.write(json.dumps({"question_id": name, **checked}, ensure_ascii=False) + "\n")
    write_manifest(out / "manifest.json", counts={"problems": len(last)}, inputs=files)
    return len(last)


def _problems(files: Sequence[Path]) -> Iterator[tuple[Path, int, str, dict[str, Any]]]:
    for file in files:
        for line, row in published_rows(file):
            if isinstance(row, DataError):
                raise DataError(row.message, path=str(file), line=line)
            if (
                not isinstance(row, Mapping)
                or not row.get("question_id")
                or not row.get("private_test_cases")
            ):
                raise DataError(
                    "no `question_id` with `private_test_cases`; expected rows of livecodebench/code_generation_lite "
                    "(AFM's parquet files hold the sample tests only)",
                    path=str(file),
                    line=line,
                )
            yield file, line, str(row["question_id"]), {key: row[key] for key in TEST_KEYS if key in row}


def _check(tests: Mapping[str, Any], file: Path, line: int) -> dict[str, Any]:
    try:
        return checked_tests(tests)
    except DataError as error:
        raise DataError(error.message, path=str(file), line=line) from None
