"""The content of a report as data, :class:`ReportInput`, and the facts of what was run."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from afm.agents import AgentSpec
from afm.evaluation.agents import Agents
from afm.evaluation.benchmarks import PublishedScore, published_scores
from afm.evaluation.failures import Scan
from afm.evaluation.health import Aspect
from afm.evaluation.manifest import RunManifest
from afm.evaluation.metrics import Metrics
from afm.evaluation.page import Curve
from afm.evaluation.paired import PairedDifference, Savings
from afm.evaluation.statistics import Interval
from afm.evaluation.tallies import Method
from afm.rewards.base import DEFAULT_FORMULA
from afm.terminal import afm_command
from afm.trajectory.record import Record

VIEW_PORT = 8765
"""Default port of `afm view` in links."""


@dataclass(frozen=True, slots=True)
class ViewLinks:
    """Links to episodes in `afm view` of ``root``."""

    root: Path
    port: int = VIEW_PORT

    @property
    def command(self) -> str:
        """The command that makes the links work."""
        return f"{afm_command()} view {shlex.quote(str(self.root))} --port {self.port}"

    def to(self, record_id: str, episodes: Path) -> str:
        """Return the address of an episode in the file ``episodes``."""
        where = os.path.relpath(episodes.resolve(), self.root.resolve())
        # An address cannot hold half a surrogate pair.
        known = record_id.encode("utf-8", "replace").decode()
        return f"http://127.0.0.1:{self.port}/#" + urlencode({"find": known, "in": where})


def links_below(folders: Sequence[Path], port: int = VIEW_PORT) -> ViewLinks:
    """Return links into several folders. `afm view` then shows the deepest folder above all of them."""
    return ViewLinks(Path(os.path.commonpath([folder.resolve() for folder in folders])), port)


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """A published figure and ours. ``missing`` is the reason why this run lacks it."""

    score: PublishedScore
    ours: Interval | None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class BenchmarkNote:
    """A run next to the published scores of its benchmark. Without ``departures`` they can be compared."""

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
        """Whether some scores are of models of other projects, measured in their own way."""
        return any(row.score.own_protocol for row in self.rows)


def beside_published(manifest: RunManifest, metrics: Metrics) -> BenchmarkNote | None:
    """Return the published scores of the benchmark in ``manifest``. ``None`` without a benchmark."""
    benchmark = manifest.sources.get("benchmark")
    if not isinstance(benchmark, Mapping):
        return None
    name = str(benchmark.get("name", ""))
    rows = (
        PublishedFigure(score, *_ours(score.metric, metrics)) for score in published_scores().get(name, ())
    )
    departures, remarks = (tuple(map(str, benchmark.get(key, ()))) for key in ("departures", "remarks"))
    return BenchmarkNote(name, tuple(rows), departures, remarks)


def _ours(metric: str, metrics: Metrics) -> tuple[Interval | None, str]:
    """Return our figure, or why it is missing. Best-of-k is by choice from a list if there is one, otherwise by grades."""
    kind, _, size = metric.rpartition("-" if metric.startswith("best-of") else "@")
    k, figure, reason = int(size), None, f"needs {size} rounds, has {metrics.rounds}"
    if kind == "best-of":
        by_method = {choice.method: choice for choice in metrics.best_of if choice.k == k}
        choice = by_method.get(Method.LIST) or by_method.get(Method.SCORE)
        figure = choice.share if choice else None
        reason = "the judge made no choice" if choice else "no judge has chosen"
    elif kind == "avg":
        figure = metrics.pass_at_1 if metrics.rounds == k else None
    elif k == 1:
        figure, reason = metrics.pass_at_1, "no episode has a score"
    else:
        figure = metrics.pass_at_k_intervals.get(k)
    return figure, "" if figure is not None else reason


@dataclass(frozen=True, slots=True)
class StageResult:
    """One evaluated stage.

    Attributes:
        name: Name for readers: ``after SFT``.
        note: Remark under the name: model, benchmark, rounds.
        scan: Results that need its episodes.
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
    """The paired difference between two stages. ``caveats`` are reasons why they may not be comparable."""

    before: str
    after: str
    result: PairedDifference
    caveats: tuple[str, ...] = ()
    prices: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """Episodes on one question, by the name of their stage. ``spec`` is their agent if it is not that of the report."""

    title: str
    episodes: tuple[tuple[str, Record], ...]
    spec: AgentSpec | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of "What was run"."""

    label: str
    value: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command line to try, and its purpose."""

    line: str
    purpose: str


@dataclass(frozen=True, slots=True)
class ReportInput:
    """Everything a report shows. Empty parts are left out of the page.

    Attributes:
        kind: Label above the title.
        spec: The agent, or the first of several. Without it trajectories are shown by author only.
        agents: All agents, where rows chose theirs.
        tool_story: Names of the stages before and after learning when to use the tool. The page then
            explains why fine-tuning left room.
        differences: Differences from one stage to each of the others.
        savings: Savings of models against teams.
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
        """Return the stage called ``name``."""
        return next(stage for stage in self.stages if stage.name == name)


_STAGES_FILE = "stages.jsonl"


def facts_of(run_dir: Path, stages: Sequence[tuple[str, RunManifest | None]]) -> Iterator[Fact]:
    """Yield the facts of a run folder and its evaluations, the most important first."""
    known = [(name, manifest) for name, manifest in stages if manifest is not None]
    if known:
        first = known[0][1]
        agent, machine = first.settings["agent"], first.machine
        system, cores = machine.get("system", "unknown system"), f"{machine.get('cpus', '?')} CPU cores"
        yield Fact("Agent", f"{agent['name']} (digest {agent['digest']})")
        for label, describe in _DESCRIBED.items():
            yield from _each(label, [(name, describe(manifest)) for name, manifest in known])
        yield Fact("Machine", ", ".join([system, cores, *machine.get("gpus", ())]))
        yield Fact("Versions", ", ".join(f"{name} {version}" for name, version in first.versions.items()))
        days = sorted({manifest.started[:10] for _, manifest in known})
        yield Fact("Evaluated", f"{' and '.join(days)} (UTC)")
    if times := _stage_seconds(run_dir / _STAGES_FILE):
        total = sum(seconds for _, seconds in times)
        parts = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in times)
        yield Fact("Time", f"{_duration(total)} in all: {parts}")


def _each(label: str, values: Sequence[tuple[str, str]]) -> Iterator[Fact]:
    """Yield one fact: the value that all stages share, or each value with its stages."""
    stages: dict[str, list[str]] = {}
    for name, value in values:
        stages.setdefault(value, []).append(name)
    shared = next(iter(stages))
    listed = "\n".join(f"{', '.join(names)}: {value or 'none'}" for value, names in stages.items())
    if len(stages) > 1 or shared:
        yield Fact(label, listed if len(stages) > 1 else shared)


def _model(manifest: RunManifest) -> str:
    model = manifest.settings["model"]
    if manifest.team is not None:
        members = ", ".join(f"{name} {model}" for name, model in manifest.team["members"].items())
        return f"the team {model['name']}{f': {members}' if members else ''}"
    digest = f" ({model['digest'][:12]})" if model["digest"] else ""
    exact = model.get("token_exact", True)
    return f"{model['name']}{digest}{'' if exact else ', not token-exact: asked by chat, token counts are estimates'}"


def _prompt(manifest: RunManifest) -> str:
    """Return the source of the prompt where it is not the agent's own."""
    prompt = manifest.settings.get("prompt")
    if prompt is None:
        return ""
    return f"text of a file (digest {prompt['digest']})" if "digest" in prompt else "each row's"


def _data(manifest: RunManifest) -> str:
    data = manifest.settings["data"]
    files = ", ".join(Path(path).name for path in manifest.sources.get("data", ()))
    return f"{data['tasks']:,}{f' of {files}' if files else ''} (sha256 {data['sha256'][:12]})"


def _sampling(manifest: RunManifest) -> str:
    rounds, sampling = manifest.settings["rounds"], manifest.settings["sampling"]
    if manifest.team is not None:
        text = "each member's own"
    elif sampling["temperature"] == 0:
        text = "greedy"
    else:
        top_k = f", top-k {sampling['top_k']}" if sampling["top_k"] else ""
        text = f"temperature {sampling['temperature']:g}, top-p {sampling['top_p']:g}{top_k}"
    return f"{text}, {rounds} round{'s' if rounds > 1 else ''}"


def _protocol(manifest: RunManifest) -> str:
    """Return the protocol of the episodes where it is not ours."""
    protocol = manifest.settings.get("protocol")
    return "" if protocol is None else f"{protocol['name']}: as AFM's script plays its web agent"


def _limits(manifest: RunManifest) -> str:
    if manifest.team is not None:
        own = manifest.team.get("limits", {})
        return ", ".join(f"{key.replace('_', ' ')} {limit:,}" for key, limit in own.items())
    limits, published = manifest.settings["limits"], "protocol" in manifest.settings
    words = {
        "max_turns": "steps" if published else "tool calls",
        "max_agent_tokens": "sampled tokens",
        "max_response_tokens": "tokens of context" if published else "response tokens",
        "max_seconds": "seconds",
        "max_tool_seconds": "seconds in tools",
    }
    return ", ".join(f"{limits[key]:,} {word}" for key, word in words.items() if limits.get(key) is not None)


def _tools(manifest: RunManifest) -> str:
    entries = (manifest.settings["tools"] or {}).get("tools", ())
    return ", ".join(str(entry.get("class_name", "?")).rpartition(".")[2] for entry in entries)


def _reward(manifest: RunManifest) -> str:
    reward = manifest.settings["reward"] or {}
    return f"{'formula' if reward else 'built-in table by data source,'} {reward.get('formula', DEFAULT_FORMULA)}"


def _prices(manifest: RunManifest) -> str:
    prices = manifest.prices
    if prices is None:
        return ""
    cached = "" if prices.cached is None else f", {prices.cached:g} cached"
    judge = "" if prices.judge is None else f", {prices.judge:g} judge"
    calls = ", ".join(f"{usd:g} {name}" for name, usd in prices.tools.items())
    tools = f"\nUSD per call: {calls}" if calls else ""
    return f"USD per million tokens: {prices.prompt:g} prompt{cached}, {prices.completion:g} completion{judge}{tools}"


_DESCRIBED: dict[str, Callable[[RunManifest], str]] = {
    "Model": _model,
    "Prompt": _prompt,
    "Questions": _data,
    "Sampling": _sampling,
    "Limits": _limits,
    "Tools": _tools,
    "Reward": _reward,
    "Prices": _prices,
    "Protocol": _protocol,
    "Seed": lambda manifest: str(manifest.settings["seed"]),
}


def _stage_seconds(path: Path) -> list[tuple[str, float]]:
    """Return name and seconds of each stage of a job, with attempts that were stopped. A half-written last line is ignored."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[str(row["name"])] = seconds.get(str(row["name"]), 0.0) + float(row["seconds"])
    return [*seconds.items()]


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
