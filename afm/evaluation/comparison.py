"""Several evaluations as one report: each beside the first."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from afm.evaluation.compare import compare, short_names
from afm.evaluation.evaluation_folder import Evaluation, read_evaluation
from afm.evaluation.facts import facts_of
from afm.evaluation.links import VIEW_PORT, links_below
from afm.evaluation.picks import pick_pairs
from afm.evaluation.report_input import Command, Pair, ReportInput, StageDifference
from afm.evaluation.score_curves import score_curves


def read_comparison(
    folders: Sequence[Path], *, anyway: bool = False, view_port: int = VIEW_PORT
) -> ReportInput:
    """Everything a report can show about several evaluations.

    Args:
        folders: ``out_dir`` of at least two evaluations; the others are compared with the first.
        anyway: Compare although settings differ that are not the model's; the page then says which.

    Raises:
        ConfigError: Such settings differ.
        DataError: A folder is no evaluation, or two have no question in common.
    """
    found = compare(folders, anyway=anyway)
    names = short_names(folders)
    evaluations = [read_evaluation(folder, name) for folder, name in zip(folders, names, strict=True)]
    stages = tuple(one.stage() for one in evaluations)
    return ReportInput(
        title=f"{', '.join(names[:-1])} and {names[-1]}",
        kind="Comparison",
        spec=evaluations[0].spec,
        facts=tuple(facts_of(folders[0], [(one.name, one.manifest) for one in evaluations])),
        stages=stages,
        differences=tuple(
            StageDifference(
                names[0],
                name,
                one.paired,
                tuple(f"Not comparable: {change}." for change in one.changes),
                f"{one.prices[:1].upper()}{one.prices[1:]}." if one.prices else "",
            )
            for name, one in zip(names, found, strict=True)
            if one.paired is not None
        ),
        savings=tuple(one.savings for one in found if one.savings is not None),
        curves=tuple(score_curves(stages)),
        pairs=tuple(_pairs(evaluations)),
        commands=(Command(_line(folders, anyway=anyway), "The figures of this page in the terminal"),),
        notes=tuple(
            f"{one.name} is not finished: its figures are of its first {one.metrics.episodes} episodes."
            for one in evaluations
            if not one.finished
        ),
        links=links_below(folders, view_port),
    )


def _pairs(evaluations: Sequence[Evaluation]) -> Iterator[Pair]:
    first, second = evaluations[:2]
    yield from pick_pairs((first.name, first.records), (second.name, second.records))


def _line(folders: Sequence[Path], *, anyway: bool) -> str:
    words = [*map(str, folders), *(["--anyway"] if anyway else [])]
    return f"afm eval compare {shlex.join(words)}"
