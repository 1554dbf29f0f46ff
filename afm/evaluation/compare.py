"""Two or more evaluations of the same questions: which settings differ, and how much better one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from afm.errors import ConfigError, DataError
from afm.evaluation.finished import finished_metrics, records_of
from afm.evaluation.manifest import EPISODES_FILE, MANIFEST_FILE, Manifest, differences, read_manifest
from afm.evaluation.metrics import Metrics, summarise
from afm.evaluation.paired import PairedDifference, holm_corrected, paired_difference
from afm.evaluation.run import METRICS_FILE

OF_THE_MODEL = ("model.",)
"""Settings that may differ: a comparison is about them."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run beside the first one.

    Attributes:
        changes: Settings other than the model that differ, as ``key: old -> new``.
        prices: Where both count money by other prices, a sentence that says so: dollars cannot be compared then.
    """

    folder: Path
    metrics: Metrics
    paired: PairedDifference | None = None
    changes: tuple[str, ...] = ()
    prices: str = ""


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
    found = [Comparison(first, _metrics(first))]
    for folder, manifest in zip(folders[1:], manifests[1:], strict=True):
        changes = tuple(
            change for change in differences(manifests[0], manifest) if not change.startswith(OF_THE_MODEL)
        )
        if changes and not anyway:
            raise ConfigError(
                f"{first} and {folder} did not measure the same thing: {'; '.join(changes)}. "
                "--anyway compares them nevertheless"
            )
        paired = paired_difference(records_of(first), records_of(folder), seed=seed)
        told = _other_prices(manifests[0], manifest)
        found.append(Comparison(folder, _metrics(folder), paired, changes, told))
    several = [one.paired for one in found if one.paired is not None]
    if len(several) < 2:
        return found
    corrected = iter(holm_corrected(several))
    return [replace(one, paired=next(corrected)) if one.paired else one for one in found]


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
        spec=manifest.spec,
        original=manifest.original,
        prices=manifest.prices,
    )


def _other_prices(first: Manifest, other: Manifest) -> str:
    """No reason to refuse: prices change no score."""
    if first.prices == other.prices or None in (first.prices, other.prices):
        return ""
    return f"money is counted by other prices: {_listed(first)} -> {_listed(other)}"


def _listed(manifest: Manifest) -> str:
    prices = manifest.prices.model_dump(exclude_none=True) if manifest.prices else {}
    tools = prices.pop("tools", {})
    return ", ".join(f"{name} {usd:g}" for name, usd in (prices | tools).items())
