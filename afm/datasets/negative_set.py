"""A data set of negative samples: which rows are chosen, and the files that hold them."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from afm.datasets.negative_samples import (
    AbsentAnswer,
    DirectAnswer,
    NegativeKind,
    NegativeSample,
    SampleMaker,
    general_question,
)
from afm.datasets.published import BadRows, listing_bad_rows
from afm.datasets.sft_files import COLUMNS, check_name, register, write_array
from afm.errors import ConfigError, DataError
from afm.runs.folder import write_manifest
from afm.trajectory.chat import row_id
from afm.trajectory.io import BrokenArrayError, explain, json_rows
from afm.trajectory.record import Record

DEFAULT_RATIOS: Final[Mapping[NegativeKind, float]] = {
    NegativeKind.ABSENT_NOT_NEEDED: 0.1,
    NegativeKind.ABSENT_NEEDED: 0.1,
    NegativeKind.PRESENT_NOT_NEEDED: 0.1,
    NegativeKind.PRESENT_NEEDED: 1.0,
}
"""Rows of a kind for each trajectory with a tool call."""

OnRow = Callable[[int], None]
"""Receives how many rows were read so far; each file is read twice."""
_Places = dict[NegativeKind, "array[int]"]


@dataclass(frozen=True, slots=True)
class NegativeSources:
    """Where samples are made from: trajectories, and questions of everyday chat as JSONL or one JSON array."""

    records: Path
    general: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """All files, the trajectories first."""
        return (self.records,) if self.general is None else (self.records, self.general)


@dataclass(frozen=True)
class NegativeSummary:
    """What was written.

    Attributes:
        wanted: Rows of each kind that the ratios ask for; more than ``rows`` where the sources hold too few.
        unused: Rows of the sources that give no sample, by reason.
        bad_rows: Rows that are wrong; listed in ``report``.
    """

    path: Path
    rows: Mapping[NegativeKind, int]
    wanted: Mapping[NegativeKind, int]
    unused: Mapping[str, int]
    bad_rows: int
    report: Path


def write_negative(
    sources: NegativeSources,
    maker: SampleMaker,
    out_dir: str | Path,
    *,
    name: str,
    ratios: Mapping[NegativeKind, float] = DEFAULT_RATIOS,
    drop_bad_rows: bool = False,
    on_row: OnRow = lambda rows: None,
) -> NegativeSummary:
    """Write samples as ``name.json`` (alpaca rows, each with its origin under ``extra_info``) and register them.

    The files are read twice, first to see what they hold, then to write what was chosen; in memory is one number for
    each row and kind. The same sources, settings and seed give the same bytes. Nothing appears under ``name.json``
    until all of it is written.

    Args:
        ratios: Rows of each kind for each trajectory with a tool call; a missing kind is not made.
        drop_bad_rows: Continue without rows that are wrong. They are listed in ``name.bad_rows.jsonl`` either way.

    Raises:
        ConfigError: The agent has no tools, a ratio is negative, or the data set would replace its own source.
        DataError: A row is wrong and not dropped, or there is nothing to make a kind from.
    """
    check_name(name)
    _check(maker, ratios)
    out = Path(out_dir)
    target, report = out / f"{name}.json", out / f"{name}.bad_rows.jsonl"
    if target.resolve() in {file.resolve() for file in sources.files}:
        raise ConfigError(f"{target}: input and output are the same file; choose another folder or name")
    reads = count(1)
    with listing_bad_rows(report) as bad:
        places, unused = _survey(_source_rows(sources, on_row, reads), maker, bad)
    if bad.count and not drop_bad_rows:
        more = [f"{bad.count} bad rows in all, listed in {report}"] if bad.count > len(bad.listed) else []
        raise DataError("\n".join(map(str, [*bad.listed, *bad.repeats.rest(), *more])))
    wanted = {
        kind: round(ratios.get(kind, 0) * len(places[NegativeKind.PRESENT_NEEDED])) for kind in NegativeKind
    }
    _check_sources(sources, maker, ratios, places)
    chosen = {kind: _choose(places[kind], wanted[kind], f"{maker.seed}/{kind}") for kind in NegativeKind}
    rows: Counter[NegativeKind] = Counter()
    write_array(
        _samples(_source_rows(sources, on_row, reads), maker, chosen, rows),
        target,
        "no row was chosen; expected higher ratios",
    )
    register(out, name, target.name, {**COLUMNS, "system": "system"})
    write_manifest(
        out / f"{name}.manifest.json",
        counts={**{str(kind): rows[kind] for kind in NegativeKind}, "bad_rows": bad.count, **unused},
        spec=maker.spec,
        seed=maker.seed,
        inputs=sources.files,
        ratios={str(kind): ratios.get(kind, 0) for kind in NegativeKind},
        absent_answer=maker.absent_answer,
        direct_answer=maker.direct_answer,
    )
    return NegativeSummary(target, rows, wanted, unused, bad.count, report)


def _check(maker: SampleMaker, ratios: Mapping[NegativeKind, float]) -> None:
    if not maker.spec.tool_roles:
        raise ConfigError(
            f"agent {maker.spec.name!r} has no tools; expected one whose tools can be taken away"
        )
    explains = maker.absent_answer is AbsentAnswer.EXPLAIN and ratios.get(NegativeKind.ABSENT_NEEDED, 0)
    if explains and maker.is_silent:
        raise ConfigError(
            f"agent {maker.spec.name!r} is asked with the question alone, which looks like a question "
            "without tools; expected absent answers of kind 'answer', or an agent with a prompt"
        )
    for kind, ratio in ratios.items():
        if not 0 <= ratio < float("inf"):
            raise ConfigError(f"ratio of {kind}: got {ratio}, expected a number that is not negative")


def _check_sources(
    sources: NegativeSources, maker: SampleMaker, ratios: Mapping[NegativeKind, float], places: _Places
) -> None:
    if not places[NegativeKind.PRESENT_NEEDED]:
        raise DataError(
            "holds no trajectory with a tool call, by which the ratios count", path=str(sources.records)
        )
    for kind in NegativeKind:
        if not ratios.get(kind, 0) or places[kind]:
            continue
        called = kind is NegativeKind.ABSENT_NEEDED
        source = "with a tool call" if called else "without a tool call, or a question of --general FILE"
        message = f"nothing to make {kind} from: expected a trajectory {source}; or set its ratio to 0"
        agents_way = kind is NegativeKind.PRESENT_NOT_NEEDED and maker.direct_answer is DirectAnswer.AGENT
        if agents_way and sources.general is not None and not maker.direct_way:
            message += (
                f". Questions of --general cannot be answered in the functions of agent {maker.spec.name!r} without a call or a "
                "grade that nobody gave; --direct plain answers them as plain text"
            )
        raise DataError(message, path=str(sources.records))


def _choose(places: array[int], most: int, seed: str) -> frozenset[int]:
    return frozenset(places if most >= len(places) else random.Random(seed).sample(places, most))


def _samples(
    rows: Iterable[_SourceRow],
    maker: SampleMaker,
    chosen: Mapping[NegativeKind, frozenset[int]],
    written: Counter[NegativeKind],
) -> Iterator[dict[str, Any]]:
    """The chosen samples in the order of their files, counted in ``written``."""
    for row in rows:
        if not any(row.number in numbers for numbers in chosen.values()):
            continue
        try:
            made = _samples_of(row, maker)
        except DataError as error:
            message = f"changed while it was read ({error.message}); run the command again"
            raise DataError(message, path=error.path, line=error.line) from None
        for sample in made if isinstance(made, list) else ():
            if row.number in chosen[sample.kind]:
                written[sample.kind] += 1
                yield _alpaca(sample, row)


def _alpaca(sample: NegativeSample, row: _SourceRow) -> dict[str, Any]:
    agent = sample.agent
    return {
        "instruction": sample.instruction,
        "input": "",
        "output": sample.output,
        "system": sample.system,
        "extra_info": {
            "kind": sample.kind,
            "answer_from": sample.answer_from,
            "agent": agent.name if agent else "",
            "agent_digest": agent.digest if agent else "",
            "file": row.file.name,
            "line": str(row.line),
            "id": row.id,
        },
    }


@dataclass(frozen=True, slots=True)
class _SourceRow:
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


def _source_rows(sources: NegativeSources, on_row: OnRow, reads: Iterator[int]) -> Iterator[_SourceRow]:
    """Every row of all files, in their order; an array that breaks off is an error, since the lost rows cannot be counted."""
    number = 0
    for file in sources.files:
        for line, item in json_rows(file):
            if isinstance(item, BrokenArrayError):
                raise item
            on_row(next(reads))
            yield _SourceRow(number, file, line, file is sources.general, item)
            number += 1


def _survey(rows: Iterable[_SourceRow], maker: SampleMaker, bad: BadRows) -> tuple[_Places, Counter[str]]:
    """For each kind the numbers of the rows it can be made from; and the rows that give no sample, by reason."""
    places: _Places = {kind: array("q") for kind in NegativeKind}
    unused: Counter[str] = Counter()
    for row in rows:
        try:
            made = _samples_of(row, maker)
        except DataError as error:
            bad.note(error)
            continue
        if isinstance(made, str):
            unused[made] += 1
            continue
        for sample in made:
            places[sample.kind].append(row.number)
    return places, unused


def _samples_of(row: _SourceRow, maker: SampleMaker) -> list[NegativeSample] | str:
    """The samples of a row, or why it has no samples; what is wrong with it is an error with its place."""
    if isinstance(row.item, DataError):
        raise row.item
    try:
        if row.is_general:
            return maker.of_question(general_question(row.item, default_id=f"{row.file.stem}-{row.line}"))
        record = Record.model_validate(row.item)
        if not record.kept:
            return "not kept by a filter"
        return maker.of_record(record) or "wrong answer without a tool"
    except (ValidationError, DataError) as error:
        message = error.message if isinstance(error, DataError) else explain(error)
        raise DataError(message, path=str(row.file), line=row.line) from None
