"""Rows that cannot be trained on: each one named, listed in a file, and refused or left out as was asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from afm.errors import DataError, RepeatedErrors
from afm.runs.atomic import replace_text

REPORT_FILE: Final = "bad_rows.jsonl"
ROW_COLUMN: Final = "_row"
"""Of aligned rows: where they came from (see :meth:`RowName.dump`)."""
FAULT_COLUMN: Final = "_fault"
"""Why a row cannot be trained on (see :meth:`BadRow.dump`), empty when it can."""
NOT_KEPT: Final = "not kept: "
"""How the reason of a record begins that a filter has sorted out before; that is no fault of the file."""
_QUESTION_CHARS = 40


@dataclass(frozen=True, slots=True)
class RowName:
    """Where a row came from: a file (or the name of a data set), and its 1-based line and number there if known."""

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
    """One row that cannot be trained on; ``question`` is the beginning of what it asks, to know it again."""

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


class BadRowReport:
    """Collects the bad rows of a training's data sets.

    Args:
        policy: The training's ``on_bad_rows``.
        path: Where they are listed, in the place of those of an earlier start; nowhere without a path.
    """

    def __init__(self, policy: str, path: Path | None = None) -> None:
        self.rows: list[BadRow] = []
        self._policy = policy
        self._path = path
        if path is not None:
            path.unlink(missing_ok=True)

    def add(self, rows: Sequence[BadRow], total: int) -> None:
        """List rows, and stop if there are faults and the policy is ``error``.

        Args:
            total: Number of rows that the bad ones are among.

        Raises:
            DataError: The policy is ``error`` and a row has a fault, or no row is left.
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
            more = f", and {kept} that a filter had not kept" if kept else ""
            print(f"bad rows: {len(faults)} left out{more}; listed in {self._path}", file=sys.stderr)

    def sieve(self, dataset: Any) -> Any:
        """``dataset`` without the rows whose ``FAULT_COLUMN`` is filled; they are added.

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
