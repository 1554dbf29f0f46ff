"""A data set of negative samples: which rows are chosen, and the files that hold them."""

from __future__ import annotations

import json
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
from afm.datasets.sft_files import COLUMNS, check_name, register
from afm.errors import ConfigError, DataError
from afm.runs.atomic import replace_text, replacing
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

_SHOWN = 5
_MAKES = {
    NegativeKind.ABSENT_NOT_NEEDED: "a trajectory without a tool call, or a question of --general FILE",
    NegativeKind.ABSENT_NEEDED: "a trajectory with a tool call",
    NegativeKind.PRESENT_NOT_NEEDED: "a trajectory without a tool call, or a question of --general FILE",
    NegativeKind.PRESENT_NEEDED: "a trajectory with a tool call",
}


OnRow = Callable[[int], None]
"""Receives how many rows were read so far; each file is read twice."""


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
        drop_bad_rows: Go on without rows that are wrong. They are listed in ``name.bad_rows.jsonl`` either way.

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
    survey = _survey(sources, maker, on_row)
    _report(report, survey.bad)
    if survey.bad and not drop_bad_rows:
        raise DataError(_list_errors(survey.bad, report))
    wanted = {
        kind: round(ratios.get(kind, 0) * len(survey.places[NegativeKind.PRESENT_NEEDED]))
        for kind in NegativeKind
    }
    _check_sources(sources, maker, ratios, survey)
    chosen = {
        kind: _choose(survey.places[kind], wanted[kind], f"{maker.seed}/{kind}") for kind in NegativeKind
    }
    rows = _write(target, _samples(sources, maker, chosen, survey.rows, on_row))
    register(out, name, target.name, {**COLUMNS, "system": "system"})
    counts = {
        **{str(kind): rows[kind] for kind in NegativeKind},
        "bad_rows": len(survey.bad),
        **survey.unused,
    }
    write_manifest(
        out / f"{name}.manifest.json",
        counts=counts,
        spec=maker.spec,
        seed=maker.seed,
        inputs=sources.files,
        ratios={str(kind): ratios.get(kind, 0) for kind in NegativeKind},
        absent_answer=maker.absent_answer,
        direct_answer=maker.direct_answer,
    )
    return NegativeSummary(target, rows, wanted, survey.unused, len(survey.bad), report)


def _check(maker: SampleMaker, ratios: Mapping[NegativeKind, float]) -> None:
    if not maker.spec.tool_roles:
        raise ConfigError(
            f"agent {maker.spec.name!r} has no tools; expected one whose tools can be taken away"
        )
    explains = maker.absent_answer is AbsentAnswer.EXPLAIN and ratios.get(NegativeKind.ABSENT_NEEDED, 0)
    if explains and maker.is_silent:
        raise ConfigError(
            f"agent {maker.spec.name!r} is asked with the question alone, so that it cannot be told apart from a question "
            "without tools; expected absent answers of kind 'answer', or an agent with a prompt"
        )
    for kind, ratio in ratios.items():
        if not 0 <= ratio < float("inf"):
            raise ConfigError(f"ratio of {kind}: got {ratio}, expected a number that is not negative")


def _check_sources(
    sources: NegativeSources, maker: SampleMaker, ratios: Mapping[NegativeKind, float], survey: _Survey
) -> None:
    if not survey.places[NegativeKind.PRESENT_NEEDED]:
        raise DataError(
            "holds no trajectory with a tool call, by which the ratios count", path=str(sources.records)
        )
    for kind in NegativeKind:
        if not ratios.get(kind, 0) or survey.places[kind]:
            continue
        message = f"nothing to make {kind} from: expected {_MAKES[kind]}; or set its ratio to 0"
        agents_way = kind is NegativeKind.PRESENT_NOT_NEEDED and maker.direct_answer is DirectAnswer.AGENT
        if agents_way and sources.general is not None and not maker.direct_way:
            message += (
                f". Questions of --general cannot be answered in the functions of agent {maker.spec.name!r} without a call or a "
                "grade that nobody gave; --direct plain answers them as plain text"
            )
        raise DataError(message, path=str(sources.records))


def _choose(places: array[int], count: int, seed: str) -> frozenset[int]:
    if count >= len(places):
        return frozenset(places)
    return frozenset(random.Random(seed).sample(places, count))


def _samples(
    sources: NegativeSources,
    maker: SampleMaker,
    chosen: Mapping[NegativeKind, frozenset[int]],
    rows_before: int,
    on_row: OnRow,
) -> Iterator[tuple[NegativeSample, _SourceRow]]:
    """The chosen samples in the order of their files, each with the row it is from."""
    for row in _source_rows(sources):
        on_row(rows_before + row.number + 1)
        if not any(row.number in numbers for numbers in chosen.values()):
            continue
        made = _samples_of(row, maker)
        if not isinstance(made, list):
            raise DataError(
                "changed while it was read; run the command again", path=str(row.file), line=row.line
            )
        for sample in made:
            if row.number in chosen[sample.kind]:
                yield sample, row


def _write(target: Path, samples: Iterator[tuple[NegativeSample, _SourceRow]]) -> Counter[NegativeKind]:
    rows: Counter[NegativeKind] = Counter()
    with replacing(target) as temporary, temporary.open("w", encoding="utf-8") as file:
        for sample, row in samples:
            file.write(",\n" if rows else "[\n")
            file.write(json.dumps(_alpaca(sample, row), ensure_ascii=False))
            rows[sample.kind] += 1
        file.write("\n]\n")
        if not rows:
            raise DataError("no row was chosen; expected higher ratios", path=str(target))
    return rows


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


def _report(path: Path, bad: list[DataError]) -> None:
    if not bad:
        path.unlink(missing_ok=True)
        return
    lines = [{"file": error.path, "line": error.line, "reason": error.message} for error in bad]
    replace_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _list_errors(bad: list[DataError], report: Path) -> str:
    lines = [str(error) for error in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        lines.append(f"... and {len(bad) - _SHOWN} more rows, all listed in {report}")
    return "\n".join(lines)


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


@dataclass
class _Survey:
    """What the sources hold; ``places`` has for each kind the numbers of the rows it can be made from."""

    places: dict[NegativeKind, array[int]] = field(
        default_factory=lambda: {kind: array("q") for kind in NegativeKind}
    )
    unused: Counter[str] = field(default_factory=Counter)
    bad: list[DataError] = field(default_factory=list)
    rows: int = 0


def _source_rows(sources: NegativeSources) -> Iterator[_SourceRow]:
    """Every row of all files, in their order; an array that breaks off is an error, since the lost rows cannot be counted."""
    number = 0
    for file in sources.files:
        for line, item in json_rows(file):
            if isinstance(item, BrokenArrayError):
                raise item
            yield _SourceRow(number, file, line, file is sources.general, item)
            number += 1


def _survey(sources: NegativeSources, maker: SampleMaker, on_row: OnRow) -> _Survey:
    """Read everything once and see what can be made of it."""
    survey = _Survey()
    for row in _source_rows(sources):
        survey.rows += 1
        on_row(survey.rows)
        made = _samples_of(row, maker)
        if isinstance(made, DataError):
            survey.bad.append(made)
        elif isinstance(made, str):
            survey.unused[made] += 1
        else:
            for sample in made:
                survey.places[sample.kind].append(row.number)
    return survey


def _samples_of(row: _SourceRow, maker: SampleMaker) -> list[NegativeSample] | str | DataError:
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
