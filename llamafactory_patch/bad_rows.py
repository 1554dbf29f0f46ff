"""Rows that cannot be trained on: each one named, listed in a file, and refused or left out as was asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from afm.errors import DataError

REPORT_FILE: Final = "bad_rows.jsonl"
NOT_KEPT: Final = "not kept: "
"""How the reason of a record begins that a filter has sorted out before; that is no fault of the file."""
_SHOWN = 5
_QUESTION_CHARS = 40


@dataclass(frozen=True, slots=True)
class RowName:
    """Where a row came from.

    Attributes:
        file: The file, or the name of a data set that is none.
        line: 1-based line on which the row begins, if known.
        row: 1-based number of the row in its file, if known.
    """

    file: str
    line: int | None = None
    row: int | None = None

    def __str__(self) -> str:
        line = "" if self.line is None else f":{self.line}"
        row = "" if self.row is None or self.file.endswith(".jsonl") else f", row {self.row}"
        return f"{self.file}{line}{row}"

    def dump(self) -> str:
        """As one text, to travel in a column of the data set."""
        return json.dumps([self.file, self.line, self.row])

    @classmethod
    def load(cls, text: str) -> RowName:
        """The inverse of :meth:`dump`."""
        return cls(*json.loads(text))


@dataclass(frozen=True, slots=True)
class BadRow:
    """One row that cannot be trained on.

    Attributes:
        name: Which.
        reason: Why not.
        question: The beginning of what the row asks, to know it again.
    """

    name: RowName
    reason: str
    question: str = ""

    def __str__(self) -> str:
        asked = f" ({self.question[:_QUESTION_CHARS]!r})" if self.question else ""
        return f"{self.name}{asked}: {self.reason}"

    @property
    def is_fault(self) -> bool:
        """False for a row that was sorted out on purpose."""
        return not self.reason.startswith(NOT_KEPT)

    def dump(self) -> str:
        """As one text, to travel in a column of the data set."""
        return json.dumps([asdict(self.name), self.reason, self.question], ensure_ascii=False)

    @classmethod
    def load(cls, text: str) -> BadRow:
        """The inverse of :meth:`dump`."""
        name, reason, question = json.loads(text)
        return cls(RowName(**name), reason, question)

    def as_line(self) -> str:
        """The row's line in the report."""
        shown = {**asdict(self.name), "reason": self.reason, "question": self.question[:_QUESTION_CHARS]}
        return json.dumps(shown, ensure_ascii=False) + "\n"


_begun: set[Path] = set()


def begin_report() -> None:
    """The next report replaces an older one instead of being added to it."""
    _begun.clear()


def report(rows: Sequence[BadRow], total: int, data_args: Any, training_args: Any) -> None:
    """List rows in the report, and stop if there are faults and ``on_bad_rows`` says so.

    Only the first of several processes writes.

    Args:
        total: Number of rows that the bad ones are among.

    Raises:
        DataError: ``on_bad_rows`` is ``error`` and a row has a fault, or no row is left.
    """
    path = Path(training_args.output_dir) / REPORT_FILE
    if training_args.process_index == 0:
        _write(path, rows)
    faults = [row for row in rows if row.is_fault]
    if faults and data_args.on_bad_rows == "error":
        raise DataError(_listed(faults, path))
    if rows and len(rows) == total:
        raise DataError(f"no row is left; {_listed(rows, path)}")
    if rows and training_args.process_index == 0:
        kept = len(rows) - len(faults)
        more = f", and {kept} that a filter had not kept" if kept else ""
        print(f"bad rows: {len(faults)} left out{more}; listed in {path}", file=sys.stderr)


def reported(path: Path) -> Iterator[BadRow]:
    """The rows of a report; none if there is no such file."""
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():  # of a text, it would also split at U+2028 in a question
        row = json.loads(line)
        yield BadRow(RowName(row["file"], row["line"], row["row"]), row["reason"], row["question"])


def _write(path: Path, rows: Sequence[BadRow]) -> None:
    if path not in _begun:
        path.unlink(missing_ok=True)
        _begun.add(path)
    if rows:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(row.as_line() for row in rows))


def _listed(rows: Sequence[BadRow], path: Path) -> str:
    lines = [str(row) for row in rows[:_SHOWN]]
    if len(rows) > _SHOWN:
        lines.append(f"... and {len(rows) - _SHOWN} more rows, all listed in {path}")
    return "\n".join(lines)
