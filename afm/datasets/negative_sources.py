"""Where negative samples are made from: trajectories and questions of everyday chat, row by row."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from afm.datasets.general import general_question
from afm.datasets.negative import NegativeKind, NegativeSample, SampleMaker
from afm.errors import DataError
from afm.trajectory.chat import row_id
from afm.trajectory.io import explain
from afm.trajectory.record import Record
from afm.trajectory.rows import BrokenArrayError, json_rows

OnRow = Callable[[int], None]
"""Receives how many rows were read so far; each file is read twice."""


@dataclass(frozen=True, slots=True)
class NegativeSources:
    """Where samples are made from.

    Attributes:
        records: Trajectory JSONL.
        general: Questions of everyday chat as JSONL or one JSON array, ``None`` for none.
    """

    records: Path
    general: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """All files, the trajectories first."""
        return (self.records,) if self.general is None else (self.records, self.general)


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One row of the sources; ``number`` counts through all files."""

    number: int
    file: Path
    line: int
    is_general: bool
    item: Any

    @property
    def id(self) -> str:
        """Its own, else its place."""
        return row_id(self.item) or f"{self.file.stem}-{self.line}"


@dataclass
class Survey:
    """What the sources hold.

    Attributes:
        places: For each kind the numbers of the rows it can be made from.
        unused: Rows that give no sample, by reason.
        bad: What is wrong with the rows that are wrong.
        rows: Rows read.
    """

    places: dict[NegativeKind, array[int]] = field(
        default_factory=lambda: {kind: array("q") for kind in NegativeKind}
    )
    unused: Counter[str] = field(default_factory=Counter)
    bad: list[DataError] = field(default_factory=list)
    rows: int = 0


def rows_of(sources: NegativeSources) -> Iterator[SourceRow]:
    """Every row of all files, in their order.

    Raises:
        DataError: An array breaks off: how many rows are lost cannot be told.
    """
    number = 0
    for file in sources.files:
        for line, item in json_rows(file):
            if isinstance(item, BrokenArrayError):
                raise item
            yield SourceRow(number, file, line, file is sources.general, item)
            number += 1


def survey_of(sources: NegativeSources, maker: SampleMaker, on_row: OnRow) -> Survey:
    """Read everything once and see what can be made of it."""
    survey = Survey()
    for row in rows_of(sources):
        survey.rows += 1
        on_row(survey.rows)
        made = samples_of(row, maker)
        if isinstance(made, DataError):
            survey.bad.append(made)
        elif isinstance(made, str):
            survey.unused[made] += 1
        else:
            for sample in made:
                survey.places[sample.kind].append(row.number)
    return survey


def samples_of(row: SourceRow, maker: SampleMaker) -> list[NegativeSample] | str | DataError:
    """The samples of a row, why there is none, or what is wrong with it."""
    if isinstance(row.item, DataError):
        return row.item
    try:
        if row.is_general:
            return maker.of_question(general_question(row.item, default_id=f"{row.file.stem}-{row.line}"))
        record = Record.model_validate(row.item)
        if not record.kept:
            return "not kept by a filter"
        return maker.of_record(record) or "wrong answer without a tool"
    except ValidationError as error:
        return DataError(explain(error), path=str(row.file), line=row.line)
    except DataError as error:
        return DataError(error.message, path=str(row.file), line=row.line)
