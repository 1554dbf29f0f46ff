"""Two or more evaluations of the same questions: which settings differ, how much better one is, and their report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from afm.errors import ConfigError, DataError
from afm.evaluation.manifest import EPISODES_FILE, MANIFEST_FILE, RunManifest, differences, read_manifest
from afm.evaluation.metrics import Metrics
from afm.evaluation.paired import (
    PairedDifference,
    Played,
    Savings,
    holm_corrected,
    paired_difference,
    savings,
)
from afm.evaluation.report_folder import Evaluation, read_evaluation, unfinished_notes
from afm.evaluation.report_input import VIEW_PORT, Command, ReportInput, StageDifference, links_below
from afm.evaluation.report_sections import facts_of, pick_pairs, score_curves
from afm.evaluation.run import records_of
from afm.trajectory.record import opened

OF_THE_MODEL = ("model.",)
"""Settings that may differ: a comparison is about them."""
_OF_A_TEAM = (*OF_THE_MODEL, "agent.", "prompt", "sampling.", "limits.")
"""The same where one of the two is a team: it has samplings and limits of its own, and writes in no agent's format."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run beside the first one.

    Attributes:
        changes: Settings other than the model that differ, as ``key: old -> new``.
        savings: Where exactly one of the two runs is a team's.
        prices: Where both count money by other prices, a sentence that says so: dollars cannot be compared then.
    """

    folder: Path
    metrics: Metrics
    paired: PairedDifference | None = None
    changes: tuple[str, ...] = ()
    prices: str = ""
    savings: Savings | None = None


def compare(folders: Sequence[Path], *, anyway: bool = False, seed: int = 0) -> list[Comparison]:
    """Compare each evaluation with the first; p-values of several are corrected for their number.

    Args:
        folders: ``output_dir`` of at least two evaluations.
        anyway: Compare although settings differ.

    Raises:
        ConfigError: Settings differ that are not the model's.
        DataError: A folder is no evaluation, or two have no question in common.
    """
    return _compare(_evaluations(folders), anyway=anyway, seed=seed)


def _evaluations(folders: Sequence[Path]) -> list[Evaluation]:
    for folder in folders:
        if not (folder / EPISODES_FILE).is_file():
            raise DataError("no episodes here; expected the output_dir of `afm eval`", path=str(folder))
        read_manifest(folder / MANIFEST_FILE)
    return [read_evaluation(folder, name) for folder, name in zip(folders, short_names(folders), strict=True)]


def _compare(runs: Sequence[Evaluation], *, anyway: bool, seed: int = 0) -> list[Comparison]:
    first, *others = runs
    rows = [Comparison(first.folder, first.metrics)]
    for other in others:
        before, after = first.declared, other.declared
        may_differ = OF_THE_MODEL if (before.team is None) == (after.team is None) else _OF_A_TEAM
        changes = tuple(change for change in differences(before, after) if not change.startswith(may_differ))
        if changes and not anyway:
            raise ConfigError(
                f"{first.folder} and {other.folder} did not measure the same thing: {'; '.join(changes)}. "
                "--anyway compares them nevertheless"
            )
        paired = paired_difference(records_of(first.folder), records_of(other.folder), seed=seed)
        prices, saved = _other_prices(before, after), _savings(first, other)
        rows.append(Comparison(other.folder, other.metrics, paired, changes, prices, saved))
    several = [row.paired for row in rows if row.paired is not None]
    if len(several) < 2:
        return rows
    corrected = zip(rows[1:], holm_corrected(several), strict=True)
    return [rows[0], *(replace(row, paired=paired) for row, paired in corrected)]


def short_names(folders: Sequence[Path]) -> list[str]:
    """The end of each path, as long as it takes to tell them all apart; a folder given twice gets its number."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path[-1]} ({number})" for number, path in enumerate(parts, 1)]


def _savings(first: Evaluation, other: Evaluation) -> Savings | None:
    """Of the model against the team, where just one of the two is a team's."""
    teams = [run for run in (first, other) if run.declared.team is not None]
    if len(teams) != 1:
        return None
    model = other if teams[0] is first else first
    return savings(*map(_played, (teams[0], model)))


def _played(run: Evaluation) -> Played:
    prices, by_team = run.declared.prices, run.declared.team is not None
    return Played(run.name, map(opened, records_of(run.folder)), prices, by_team)


def _other_prices(first: RunManifest, other: RunManifest) -> str:
    """No reason to refuse: prices change no score."""
    if first.prices == other.prices or None in (first.prices, other.prices):
        return ""
    return f"money is counted by other prices: {_listed(first)} -> {_listed(other)}"


def _listed(manifest: RunManifest) -> str:
    prices = manifest.prices.model_dump(exclude_none=True) if manifest.prices else {}
    tools = prices.pop("tools", {})
    return ", ".join(f"{name} {usd:g}" for name, usd in (prices | tools).items())


def read_comparison(
    folders: Sequence[Path], *, anyway: bool = False, view_port: int = VIEW_PORT
) -> ReportInput:
    """Everything a report can show about several evaluations.

    Args:
        folders: ``output_dir`` of at least two evaluations; the others are compared with the first.
        anyway: Compare although settings differ that are not the model's; the page then says which.

    Raises:
        ConfigError: Such settings differ.
        DataError: A folder is no evaluation, or two have no question in common.
    """
    runs = _evaluations(folders)
    first, *_ = names = [run.name for run in runs]
    rows = _compare(runs, anyway=anyway)
    stages = tuple(run.stage() for run in runs)
    return ReportInput(
        title=f"{', '.join(names[:-1])} and {names[-1]}",
        kind="Comparison",
        spec=runs[0].spec,
        facts=tuple(facts_of(folders[0], [(run.name, run.manifest) for run in runs])),
        stages=stages,
        differences=tuple(
            StageDifference(
                first,
                name,
                row.paired,
                tuple(f"Not comparable: {change}." for change in row.changes),
                f"{row.prices[:1].upper()}{row.prices[1:]}." if row.prices else "",
            )
            for name, row in zip(names, rows, strict=True)
            if row.paired is not None
        ),
        savings=tuple(row.savings for row in rows if row.savings is not None),
        curves=tuple(score_curves(stages)),
        pairs=tuple(pick_pairs(*((run.name, run.records) for run in runs[:2]))),
        commands=(Command(_line(folders, anyway=anyway), "The figures of this page in the terminal"),),
        notes=tuple(unfinished_notes(runs)),
        links=links_below(folders, view_port),
    )


def _line(folders: Sequence[Path], *, anyway: bool) -> str:
    words = [*map(str, folders), *(["--anyway"] if anyway else [])]
    return f"afm eval compare {shlex.join(words)}"
