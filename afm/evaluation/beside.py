"""A run's figures beside the published ones, and whether the two may be compared."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from afm.evaluation.benchmarks import PublishedScore, published_scores
from afm.evaluation.manifest import Manifest
from afm.evaluation.measures import BestOf, Method
from afm.evaluation.metrics import Metrics
from afm.evaluation.statistics import Interval

_METRIC = re.compile(r"(pass@|avg@|best-of-)(\d+)\Z")


@dataclass(frozen=True, slots=True)
class Beside:
    """A published figure and ours.

    Attributes:
        ours: ``None`` where this run has no such figure.
        missing: Why it has none.
    """

    score: PublishedScore
    ours: Interval | float | None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class BenchmarkNote:
    """A run beside what was published of its benchmark.

    Attributes:
        departures: In which settings this run is another one; none of them means comparable settings.
        remarks: What else a reader should know, a sentence each.
    """

    benchmark: str
    rows: tuple[Beside, ...]
    departures: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    @property
    def comparable(self) -> bool:
        """Whether every setting is the published one."""
        return not self.departures

    @property
    def has_other_protocols(self) -> bool:
        """Whether some scores are of other projects' models, measured in their own way."""
        return any(row.score.own_protocol for row in self.rows)


def beside_published(manifest: Manifest, metrics: Metrics) -> BenchmarkNote | None:
    """What was published of the benchmark that ``manifest`` names, ``None`` where it names none."""
    told = manifest.sources.get("benchmark")
    if not isinstance(told, Mapping):
        return None
    name = str(told.get("name", ""))
    rows = (Beside(score, *_ours(score.metric, metrics)) for score in published_scores().get(name, ()))
    departures, remarks = (tuple(map(str, told.get(key, ()))) for key in ("departures", "remarks"))
    return BenchmarkNote(name, tuple(rows), departures, remarks)


def _ours(metric: str, metrics: Metrics) -> tuple[Interval | float | None, str]:
    found = _METRIC.match(metric)
    kind, k = (found[1], int(found[2])) if found else ("", 0)
    if kind == "pass@" and k == 1:
        return metrics.pass_at_1, "" if metrics.pass_at_1 else "nothing has a score"
    if kind == "pass@":
        value = metrics.pass_at_k_intervals.get(k) or metrics.pass_at_k.get(k)
        return value, "" if value is not None else f"needs {k} rounds, has {metrics.rounds}"
    if kind == "avg@":
        enough = metrics.rounds == k
        return (
            metrics.pass_at_1 if enough else None,
            "" if enough else f"needs {k} rounds, has {metrics.rounds}",
        )
    chosen = best_of(metrics, k)
    return (
        (chosen.share, "" if chosen.share else "the judge chose nowhere")
        if chosen
        else (None, "no judge has chosen")
    )


def best_of(metrics: Metrics, k: int) -> BestOf | None:
    """The run's best-of-k: by choice from a list where there is one, else by grades."""
    found = {one.method: one for one in metrics.best_of if one.k == k}
    return found.get(Method.LIST) or found.get(Method.SCORE)
