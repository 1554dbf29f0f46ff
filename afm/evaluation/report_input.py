"""What a report shows, as data: whoever fills a :class:`ReportInput` gets a page."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from afm.agents import AgentSpec
from afm.evaluation.agents import Agents
from afm.evaluation.benchmarks import PublishedScore, published_scores
from afm.evaluation.failures import Scan
from afm.evaluation.manifest import RunManifest
from afm.evaluation.measures import BestOf, Method
from afm.evaluation.metrics import Metrics
from afm.evaluation.page import Curve
from afm.evaluation.paired import PairedDifference, Savings
from afm.evaluation.statistics import Interval
from afm.evaluation.training_logs import Aspect
from afm.trajectory.record import Record

VIEW_PORT = 8765
"""Of `afm view` in links, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class ViewLinks:
    """Links into the episodes that `afm view` shows of ``root``."""

    root: Path
    port: int = VIEW_PORT

    @property
    def command(self) -> str:
        """What makes the links work."""
        return f"afm view {shlex.quote(str(self.root))} --port {self.port}"

    def to(self, record_id: str, episodes: Path) -> str:
        """The address of one episode of the file ``episodes``."""
        where = os.path.relpath(episodes.resolve(), self.root.resolve())
        # Half a surrogate pair has no place in an address.
        known = record_id.encode("utf-8", "replace").decode()
        return f"http://127.0.0.1:{self.port}/#" + urlencode({"find": known, "in": where})


def links_below(folders: Sequence[Path], port: int = VIEW_PORT) -> ViewLinks:
    """Links into several folders: the deepest one that holds them all is shown."""
    if len(folders) == 1:
        return ViewLinks(folders[0], port)
    return ViewLinks(Path(os.path.commonpath([folder.resolve() for folder in folders])), port)


_METRIC = re.compile(r"(pass@|avg@|best-of-)(\d+)\Z")


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """A published figure and ours; ``missing`` says why this run has none."""

    score: PublishedScore
    ours: Interval | float | None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class BenchmarkNote:
    """A run beside what was published of its benchmark; without ``departures`` their settings are comparable."""

    benchmark: str
    rows: tuple[PublishedFigure, ...]
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


def beside_published(manifest: RunManifest, metrics: Metrics) -> BenchmarkNote | None:
    """What was published of the benchmark that ``manifest`` names, ``None`` where it names none."""
    benchmark = manifest.sources.get("benchmark")
    if not isinstance(benchmark, Mapping):
        return None
    name = str(benchmark.get("name", ""))
    rows = (
        PublishedFigure(score, *_ours(score.metric, metrics)) for score in published_scores().get(name, ())
    )
    departures, remarks = (tuple(map(str, benchmark.get(key, ()))) for key in ("departures", "remarks"))
    return BenchmarkNote(name, tuple(rows), departures, remarks)


def _ours(metric: str, metrics: Metrics) -> tuple[Interval | float | None, str]:
    """Our figure, or why there is none."""
    match = _METRIC.match(metric)
    kind, k = (match[1], int(match[2])) if match else ("best-of-", 0)
    figure: Interval | float | None
    if kind == "best-of-":
        choice = best_of(metrics, k)
        figure, reason = (
            (choice.share, "the judge chose nowhere") if choice else (None, "no judge has chosen")
        )
    elif kind == "pass@" and k == 1:
        figure, reason = metrics.pass_at_1, "nothing has a score"
    elif kind == "pass@":
        figure = metrics.pass_at_k_intervals.get(k) or metrics.pass_at_k.get(k)
        reason = f"needs {k} rounds, has {metrics.rounds}"
    else:
        figure = metrics.pass_at_1 if metrics.rounds == k else None
        reason = f"needs {k} rounds, has {metrics.rounds}"
    return figure, "" if figure is not None else reason


def best_of(metrics: Metrics, k: int) -> BestOf | None:
    """The run's best-of-k: by choice from a list where there is one, else by grades."""
    by_method = {choice.method: choice for choice in metrics.best_of if choice.k == k}
    return by_method.get(Method.LIST) or by_method.get(Method.SCORE)


@dataclass(frozen=True, slots=True)
class StageResult:
    """One evaluated stage.

    Attributes:
        name: What a reader calls it: ``after SFT``.
        note: A remark under the name: model, benchmark, rounds.
        scan: What only its episodes tell.
        own_prompt: Whether its questions were asked in the agent's own prompt, which a page can show.
    """

    name: str
    metrics: Metrics
    episodes: Path | None = None
    note: str = ""
    scan: Scan | None = None
    published: BenchmarkNote | None = None
    own_prompt: bool = True


@dataclass(frozen=True, slots=True)
class StageDifference:
    """The paired difference between two stages, with a sentence for each reason why they may not be comparable."""

    before: str
    after: str
    result: PairedDifference
    caveats: tuple[str, ...] = ()
    prices: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """Episodes on one question, by the name of their stage; ``spec`` is their agent, where it is another than the report's."""

    title: str
    episodes: tuple[tuple[str, Record], ...]
    spec: AgentSpec | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of "what was run"."""

    label: str
    value: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command line to try, and what it does."""

    line: str
    purpose: str


@dataclass(frozen=True, slots=True)
class ReportInput:
    """Everything a report shows; empty parts are left out of the page.

    Attributes:
        kind: What the page is called above its title.
        spec: The agent, of several the first; without it trajectories are shown by author only.
        agents: All of them, where rows chose theirs.
        tool_story: Names of the stages before and after learning when to use the tool; the page then
            explains why fine-tuning left room.
        differences: Between two stages each, all of them from the same one.
        savings: Of models against teams.
    """

    title: str
    kind: str = "Run report"
    spec: AgentSpec | None = None
    agents: Agents | None = None
    facts: tuple[Fact, ...] = ()
    stages: tuple[StageResult, ...] = ()
    differences: tuple[StageDifference, ...] = ()
    savings: tuple[Savings, ...] = ()
    tool_story: tuple[str, str] | None = None
    curves: tuple[Curve, ...] = ()
    health: tuple[Aspect, ...] = ()
    pairs: tuple[Pair, ...] = ()
    commands: tuple[Command, ...] = ()
    notes: tuple[str, ...] = ()
    links: ViewLinks | None = None

    def stage(self, name: str) -> StageResult:
        """The stage called ``name``."""
        return next(stage for stage in self.stages if stage.name == name)
