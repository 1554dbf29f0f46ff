"""A data set of negative samples: the choice of rows, and the output files."""

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
"""Rows of each kind per trajectory with a tool call."""

OnRow = Callable[[int], None]
"""Receives the number of rows read so far. Each file is read twice."""
_Places = dict[NegativeKind, "array[int]"]


@dataclass(frozen=True, slots=True)
class NegativeSources:
    """Sources of samples: trajectories, and questions of everyday chat as JSONL or one JSON array."""

    records: Path
    general: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """All files, the trajectories first."""
        return (self.records,) if self.general is None else (self.records, self.general)


@dataclass(frozen=True)
class NegativeSummary:
    """The result of writing a data set.

    Attributes:
        wanted: Rows of each kind that the ratios ask for. More than ``rows`` if the sources hold too few.
        unused: Rows of the sources that give no sample, by reason.
        bad_rows: Number of bad rows. ``report`` lists them.
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

    The files are read twice: first to survey their rows, then to write the chosen ones. Memory holds one number per row
    and kind. The same sources, settings and seed give the same bytes. ``name.json`` appears when it is complete.

    Args:
        ratios: Rows of each kind per trajectory with a tool call. A missing kind is left out.
        drop_bad_rows: Whether to continue without bad rows. ``name.bad_rows.jsonl`` lists them in any case.

    Raises:
        ConfigError: The agent has no tools, a ratio is negative, or the data set would replace its own source.
        DataError: A row is bad and not dropped, or the sources hold no row for a kind.
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
            f"the prompt of agent {maker.spec.name!r} is only the question, as in a question without tools; "
            "expected absent answers of kind 'answer', or an agent with a prompt"
        )
    for kind, ratio in ratios.items():
        if not 0 <= ratio < float("inf"):
            raise ConfigError(f"ratio of {kind}: got {ratio}, expected a number that is not negative")


def _check_sources(
    sources: NegativeSources, maker: SampleMaker, ratios: Mapping[NegativeKind, float], places: _Places
) -> None:
    if not places[NegativeKind.PRESENT_NEEDED]:
        raise DataError(
            "holds no trajectory with a tool call; ratios count per trajectory with one",
            path=str(sources.records),
        )
    for kind in NegativeKind:
        if not ratios.get(kind, 0) or places[kind]:
            continue
        called = kind is NegativeKind.ABSENT_NEEDED
        source = "with a tool call" if called else "without a tool call, or a question of --general FILE"
        message = f"nothing to make {kind} from: expected a trajectory {source}; or set its ratio to 0: --ratio {kind}=0"
        agents_way = kind is NegativeKind.PRESENT_NOT_NEEDED and maker.direct_answer is DirectAnswer.AGENT
        if agents_way and sources.general is not None and not maker.direct_way:
            message += (
                f". Agent {maker.spec.name!r} cannot answer questions of --general in its tags without a call or an invented "
                "grade; --direct plain answers them as plain text"
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
    """Yield the chosen samples in the order of their files, and count them in ``written``."""
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
    """One row of the sources. ``number`` counts over all files."""

    number: int
    file: Path
    line: int
    is_general: bool
    item: Any

    @property
    def id(self) -> str:
        """The row's own id, else its place."""
        return row_id(self.item) or f"{self.file.stem}-{self.line}"


def _source_rows(sources: NegativeSources, on_row: OnRow, reads: Iterator[int]) -> Iterator[_SourceRow]:
    """Yield every row of all files in order. A truncated array is an error, because the lost rows cannot be counted."""
    number = 0
    for file in sources.files:
        for line, item in json_rows(file):
            if isinstance(item, BrokenArrayError):
                raise item
            on_row(next(reads))
            yield _SourceRow(number, file, line, file is sources.general, item)
            number += 1


def _survey(rows: Iterable[_SourceRow], maker: SampleMaker, bad: BadRows) -> tuple[_Places, Counter[str]]:
    """Return the numbers of the rows that can give each kind, and the count of rows without a sample by reason."""
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
    """Return the samples of a row, or why it has no samples. A bad row is an error with file and line."""
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
        message = error.message if isinstance(error, DataError) else explain(error, row.file)
        raise DataError(message, path=str(row.file), line=row.line) from None
