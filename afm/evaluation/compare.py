"""Two or more evaluations of the same questions: which settings differ, how much better one is, and their report."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from afm.errors import ConfigError, DataError
from afm.evaluation.manifest import EPISODES_FILE, MANIFEST_FILE, RunManifest, differences, read_manifest
from afm.evaluation.metrics import Metrics, summarise
from afm.evaluation.paired import (
    PairedDifference,
    Played,
    Savings,
    holm_corrected,
    paired_difference,
    savings,
)
from afm.evaluation.report_input import VIEW_PORT, Command, Pair, ReportInput, StageDifference, links_below
from afm.evaluation.report_sections import facts_of, pick_pairs, score_curves
from afm.evaluation.run import METRICS_FILE, finished_metrics, records_of
from afm.evaluation.run_folder import Evaluation, read_evaluation
from afm.trajectory.sealing import opened

OF_THE_MODEL = ("model.",)
"""Settings that may differ: a comparison is about them."""
_OF_A_TEAM = (*OF_THE_MODEL, "agent.", "prompt", "sampling.", "limits.")
"""The same where one of the two is a team: it has samplings and limits of its own, and writes in no agent's format."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run beside the first one.

    Attributes:
        changes: Settings other than the model that differ, as ``key: old -> new``.
        savings: What the model costs against the team, where exactly one of the two runs is a team's.
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
        folders: ``out_dir`` of at least two evaluations.
        anyway: Compare although settings differ.

    Raises:
        ConfigError: Settings differ that are not the model's.
        DataError: A folder is no evaluation, or two have no question in common.
    """
    first = folders[0]
    for folder in folders:
        _must_be_evaluation(folder)
    manifests = [read_manifest(folder / MANIFEST_FILE) for folder in folders]
    runs = list(zip(short_names(folders), folders, manifests, strict=True))
    found = [Comparison(first, _metrics(first))]
    for folder, manifest in zip(folders[1:], manifests[1:], strict=True):
        may_differ = OF_THE_MODEL if (manifests[0].team is None) == (manifest.team is None) else _OF_A_TEAM
        changes = tuple(
            change for change in differences(manifests[0], manifest) if not change.startswith(may_differ)
        )
        if changes and not anyway:
            raise ConfigError(
                f"{first} and {folder} did not measure the same thing: {'; '.join(changes)}. "
                "--anyway compares them nevertheless"
            )
        paired = paired_difference(records_of(first), records_of(folder), seed=seed)
        told = _other_prices(manifests[0], manifest)
        saved = _savings(runs[0], runs[len(found)])
        found.append(Comparison(folder, _metrics(folder), paired, changes, told, saved))
    several = [one.paired for one in found if one.paired is not None]
    if len(several) < 2:
        return found
    corrected = iter(holm_corrected(several))
    return [replace(one, paired=next(corrected)) if one.paired else one for one in found]


def short_names(folders: Sequence[Path]) -> list[str]:
    """The end of each path, as long as it takes to tell them all apart; a folder given twice gets its number."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{one[-1]} ({number})" for number, one in enumerate(parts, 1)]


def _must_be_evaluation(folder: Path) -> None:
    if not (folder / EPISODES_FILE).is_file():
        raise DataError("no episodes here; expected the out_dir of `afm eval`", path=str(folder))


def _metrics(folder: Path) -> Metrics:
    """The stored figures; of a run that is not finished, those so far."""
    if (folder / METRICS_FILE).is_file():
        return finished_metrics(folder)
    manifest = read_manifest(folder / MANIFEST_FILE)
    return summarise(
        records_of(folder),
        spec=manifest.agents,
        prices=manifest.prices,
    )


def _savings(first: tuple[str, Path, RunManifest], other: tuple[str, Path, RunManifest]) -> Savings | None:
    if (first[2].team is None) == (other[2].team is None):
        return None
    team, model = (first, other) if first[2].team is not None else (other, first)
    return savings(_played(*team), _played(*model))


def _played(name: str, folder: Path, manifest: RunManifest) -> Played:
    return Played(name, map(opened, records_of(folder)), manifest.prices, manifest.team is not None)


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
