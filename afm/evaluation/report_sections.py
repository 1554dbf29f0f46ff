"""Sections of a report: the facts of what was run, the episodes it shows, curves of scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from afm.evaluation.manifest import RunManifest
from afm.evaluation.metrics import Metrics, passed, task_of
from afm.evaluation.page import Curve, Series
from afm.evaluation.report_input import Fact, Pair, StageResult
from afm.evaluation.statistics import Interval
from afm.rewards.formula import DEFAULT_FORMULA
from afm.trajectory.record import Record

_STAGES_FILE = "stages.jsonl"


def facts_of(run_dir: Path, stages: Sequence[tuple[str, RunManifest | None]]) -> Iterator[Fact]:
    """Facts of a run folder and its evaluations, in the order a reader asks for them."""
    known = [(name, manifest) for name, manifest in stages if manifest is not None]
    if known:
        first = known[0][1]
        agent = first.settings["agent"]
        yield Fact("Agent", f"{agent['name']} (digest {agent['digest']})")
        for label, describe in _DESCRIBED.items():
            yield from _each(label, [(name, describe(manifest)) for name, manifest in known])
        yield Fact("Machine", _machine(first.machine))
        yield Fact("Versions", ", ".join(f"{name} {version}" for name, version in first.versions.items()))
        yield Fact(
            "Evaluated", " and ".join(sorted({manifest.started[:10] for _, manifest in known})) + " (UTC)"
        )
    times = _stage_seconds(run_dir / _STAGES_FILE)
    if times:
        total = sum(seconds for _, seconds in times)
        parts = ", ".join(f"{name} {_duration(seconds)}" for name, seconds in times)
        yield Fact("Time", f"{_duration(total)} in all: {parts}")


def _each(label: str, values: Sequence[tuple[str, str]]) -> Iterator[Fact]:
    """One fact: the value all stages share, or each value with the stages that have it."""
    stages: dict[str, list[str]] = {}
    for name, value in values:
        stages.setdefault(value, []).append(name)
    if len(stages) == 1:
        yield from [Fact(label, value) for value in stages if value]
    else:
        yield Fact(
            label, "; ".join(f"{', '.join(names)}: {value or 'none'}" for value, names in stages.items())
        )


def _model(manifest: RunManifest) -> str:
    model = manifest.settings["model"]
    if manifest.team is not None:
        members = ", ".join(f"{name} {model}" for name, model in manifest.team["members"].items())
        return f"the team {model['name']}{f': {members}' if members else ''}"
    digest = f" ({model['digest'][:12]})" if model["digest"] else ""
    inexact = (
        ""
        if model.get("token_exact", True)
        else ", not token-exact: asked by chat, token counts are estimates"
    )
    return f"{model['name']}{digest}{inexact}"


def _prompt(manifest: RunManifest) -> str:
    """Whose words asked, where they are not the agent's own."""
    prompt = manifest.settings.get("prompt")
    if prompt is None:
        return ""
    return f"text of a file (digest {prompt['digest']})" if "digest" in prompt else "each row's"


def _data(manifest: RunManifest) -> str:
    data = manifest.settings["data"]
    files = ", ".join(Path(path).name for path in manifest.sources.get("data", ()))
    return f"{data['tasks']:,}{f' of {files}' if files else ''} (sha256 {data['sha256'][:12]})"


def _sampling(manifest: RunManifest) -> str:
    settings = manifest.settings
    sampling = settings["sampling"]
    if manifest.team is not None:
        return f"each member's own, {settings['rounds']} round{'s' if settings['rounds'] > 1 else ''}"
    if sampling["temperature"] == 0:
        text = "greedy"
    else:
        top_k = f", top-k {sampling['top_k']}" if sampling["top_k"] else ""
        text = f"temperature {sampling['temperature']:g}, top-p {sampling['top_p']:g}{top_k}"
    rounds = settings["rounds"]
    return f"{text}, {rounds} round{'s' if rounds > 1 else ''}"


def _protocol(manifest: RunManifest) -> str:
    """Whose way to play episodes where it is not ours."""
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
    reward = manifest.settings["reward"]
    if not reward:
        return f"built-in table by data source, {DEFAULT_FORMULA}"
    return f"formula {reward.get('formula', DEFAULT_FORMULA)}"


def _prices(manifest: RunManifest) -> str:
    prices = manifest.prices
    if prices is None:
        return ""
    cached = "" if prices.cached is None else f", {prices.cached:g} cached"
    judge = "" if prices.judge is None else f", {prices.judge:g} of the judge"
    tools = "".join(f", {usd:g} a call of {name}" for name, usd in prices.tools.items())
    return f"USD {prices.prompt:g} prompt{cached}, {prices.completion:g} completion{judge} (a million tokens){tools}"


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


def _machine(machine: Mapping[str, Any]) -> str:
    parts = [str(machine.get("system", "unknown system")), f"{machine.get('cpus', '?')} CPU cores"]
    return ", ".join([*parts, *machine.get("gpus", ())])


def _stage_seconds(path: Path) -> list[tuple[str, float]]:
    """Name and seconds of each finished stage of a job; a half-written last line is ignored."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(str(row["name"]), float(row["seconds"])) for row in rows]


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


Reader = Callable[[], Iterable[Record]]
"""Reads the episodes of a stage from the beginning."""


@dataclass(frozen=True, slots=True)
class _Glance:
    """What the choice needs of the first scored episode of a question."""

    id: str
    question: str
    passed: bool
    tool_calls: int


def pick_pairs(before: tuple[str, Reader], after: tuple[str, Reader], *, count: int = 3) -> list[Pair]:
    """Questions that went differently, each as a pair: one gained, one as before, one not solved after."""
    first, second = _glances(before[1]()), _glances(after[1]())
    common = [
        (first[task], second[task])
        for task in sorted(first.keys() & second.keys())
        if first[task].question == second[task].question
    ]
    chosen = _choose(common, _kinds(before[0], after[0]), count)
    old_records = _load(before[1](), {old.id for _, old, _ in chosen})
    new_records = _load(after[1](), {new.id for _, _, new in chosen})
    return [
        Pair(title, ((before[0], old_records[old.id]), (after[0], new_records[new.id])))
        for title, old, new in chosen
    ]


def _kinds(before: str, after: str) -> list[tuple[str, Callable[[_Glance, _Glance], bool]]]:
    return [
        (
            f"Solved {after}, with the tool it did not use {before}",
            lambda old, new: not old.passed and new.passed and old.tool_calls == 0 < new.tool_calls,
        ),
        (f"Solved {before} and {after}", lambda old, new: old.passed and new.passed),
        (f"Solved {before}, no longer {after}", lambda old, new: old.passed and not new.passed),
        (f"Not solved {before}, nor {after}", lambda old, new: not old.passed and not new.passed),
        (f"Solved {after}, not {before}", lambda old, new: not old.passed and new.passed),
    ]


def _choose(
    pairs: Sequence[tuple[_Glance, _Glance]],
    kinds: Sequence[tuple[str, Callable[[_Glance, _Glance], bool]]],
    count: int,
) -> list[tuple[str, _Glance, _Glance]]:
    """The first pair of every kind, then the second of every kind, until there are ``count``."""
    chosen: list[tuple[str, _Glance, _Glance]] = []
    taken: set[str] = set()
    for title, fits in [kind for _ in range(count) for kind in kinds]:
        pair_of_kind = next((pair for pair in pairs if pair[0].id not in taken and fits(*pair)), None)
        if pair_of_kind is not None and len(chosen) < count:
            taken.add(pair_of_kind[0].id)
            chosen.append((title, *pair_of_kind))
    return chosen


def pick_episodes(name: str, read: Reader, *, count: int = 3) -> Iterator[Pair]:
    """Single episodes: one passed, one not passed, one without a score, then whatever comes first."""
    first: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    titles = {True: "Passed", False: "Not passed", None: "Without a score"}
    for record in read():
        outcome = passed(record)
        if len(first[outcome]) < count:
            first[outcome].append(record.id)
    ranked = sorted(
        (rank, number, identity, titles[outcome])
        for number, (outcome, ids) in enumerate(first.items())
        for rank, identity in enumerate(ids)
    )
    chosen = ranked[:count]
    records = _load(read(), {identity for _, _, identity, _ in chosen})
    for _, _, identity, title in chosen:
        yield Pair(f"{title}, {name}", ((name, records[identity]),))


def _glances(records: Iterable[Record]) -> dict[str, _Glance]:
    """By task, of its episode with the smallest id, so that the order in the file does not matter."""
    glances: dict[str, _Glance] = {}
    for record in records:
        outcome = passed(record)
        task = task_of(record)
        if outcome is None or (task in glances and glances[task].id <= record.id):
            continue
        glances[task] = _Glance(record.id, record.question, outcome, record.cost.tool_calls)
    return glances


def _load(records: Iterable[Record], ids: set[str]) -> dict[str, Record]:
    return {record.id: record for record in records if record.id in ids}


_AT_MOST = 4
"""Stages in one picture; it has as many colours."""


def score_curves(stages: Sequence[StageResult]) -> Iterator[Curve]:
    """pass@k over k for every stage with several rounds, then cost against score over all of them."""
    shown = stages[:_AT_MOST]
    for stage in shown:
        if stage.metrics.pass_at_k:
            yield _rounds(stage, alone=len(stages) == 1)
    budgets = tuple(
        Series(stage.name, stage.scan.tokens, stage.scan.solved)
        for stage in shown
        if stage.scan is not None and len(stage.scan.tokens) > 1
    )
    if budgets:
        yield Curve(
            "Solved within a budget",
            "agent and observed tokens of an episode",
            budgets,
            "Share of the scored episodes that passed with at most so many tokens; it ends at the share that passed at all.",
            x_from_zero=True,
            y_from_zero=True,
        )
    money = tuple(line for stage in shown if (line := _money(stage)) is not None)
    points = tuple(point for stage in shown if (point := _point(stage)) is not None)
    if any(len(line.x) > 1 for line in money) or len(money) > 1:
        caption = (
            "pass@k for the money of k episodes, from k = 1, with its 95 % interval; further left is cheaper."
        )
        yield replace(_COSTS, x_label="USD a question", series=money, caption=caption, x_whole=False)
    elif len(points) > 1:
        yield replace(_COSTS, series=points)


_COSTS = Curve(
    "Cost against score",
    "tokens of an episode, mean",
    (),
    "pass@1 with its 95 % interval; further left is cheaper.",
    x_from_zero=True,
    y_from_zero=True,
)


def _rounds(stage: StageResult, *, alone: bool) -> Curve:
    metrics = stage.metrics
    ks = tuple(map(float, metrics.pass_at_k))
    ends = [metrics.pass_at_k_intervals.get(k) for k in metrics.pass_at_k]
    known = [end for end in ends if end is not None]
    whole = len(known) == len(ends)
    lines = [
        Series(
            "pass@k",
            ks,
            tuple(metrics.pass_at_k.values()),
            tuple(end.low for end in known) if whole else (),
            tuple(end.high for end in known) if whole else (),
        ),
        Series("pass^k", tuple(map(float, metrics.pass_hat_k)), tuple(metrics.pass_hat_k.values())),
        *_choices(metrics),
    ]
    name = "" if alone else f", {stage.name}"
    band = " The band is the 95 % interval of pass@k over questions." if whole else ""
    caption = f"Chance that one (pass@k) or each (pass^k) of k episodes of a question passes.{band}"
    return Curve(
        f"Rounds{name}", "episodes of a question, k", tuple(lines), caption, y_from_zero=True, y_max=1.03
    )


def _choices(metrics: Metrics) -> Iterator[Series]:
    if metrics.majority is not None:
        yield Series("majority", (float(metrics.rounds),), (metrics.majority,), points=True)
    by_method: dict[str, dict[float, Interval]] = {}
    for choice in metrics.best_of:
        if choice.share is not None:
            by_method.setdefault(f"judge, {choice.method}", {})[float(choice.k)] = choice.share
    for name, shares in by_method.items():
        ks = tuple(sorted(shares))
        ends = [shares[k] for k in ks]
        values, low, high = zip(*((end.value, end.low, end.high) for end in ends), strict=True)
        yield Series(name, ks, values, low, high, points=True)


def _money(stage: StageResult) -> Series | None:
    """pass@k over the dollars of k episodes; pass@1 alone for one round."""
    metrics, usd = stage.metrics, stage.metrics.usd
    if usd is None or metrics.pass_at_1 is None:
        return None
    scores = metrics.pass_at_k_intervals or {1: metrics.pass_at_1}
    return Series(
        stage.name,
        tuple(k * usd.per_episode.value for k in scores),
        tuple(score.value for score in scores.values()),
        tuple(score.low for score in scores.values()),
        tuple(score.high for score in scores.values()),
        points=len(scores) == 1,
    )


def _point(stage: StageResult) -> Series | None:
    metrics, score = stage.metrics, stage.metrics.pass_at_1
    tokens = (metrics.agent_tokens or 0.0) + (metrics.observation_tokens or 0.0)
    if score is None or not tokens:
        return None
    return Series(stage.name, (tokens,), (score.value,), (score.low,), (score.high,), points=True)
