"""Curves of a report, of trainings (LLaMA-Factory's log, ours of ``afm rl``) and of scores, and the health of a training."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm.evaluation.metrics import Metrics
from afm.evaluation.page import Curve, Series
from afm.evaluation.statistics import Interval

if TYPE_CHECKING:
    from afm.evaluation.report_input import StageResult

TRAINER_LOG = "trainer_log.jsonl"
RL_METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A curve: its lines by label, with the keys under which a row may hold each, best first.

    Attributes:
        share: Whether values are shares, so that the axis ends at 1.
        only_some: Not every run has it, so its absence needs no note.
    """

    title: str
    caption: str
    lines: Mapping[str, tuple[str, ...]]
    share: bool = False
    only_some: bool = False


_RL_CURVES = (
    _Wanted(
        "Reward",
        "Mean over every sampled episode of a step, groups thrown away included.",
        {"reward": ("reward", "critic/score/mean"), "answer right": ("correct",)},
        share=True,
    ),
    _Wanted(
        "Validation",
        "Means over the scored episodes of the validations within the training.",
        {"reward": ("validation_reward",), "solved": ("validation_solved",)},
        share=True,
        only_some=True,
    ),
    _Wanted(
        "Episodes that call a tool",
        "Share of sampled episodes with at least one call.",
        {"share": ("tool_share",)},
        share=True,
    ),
    _Wanted(
        "Entropy",
        "How undecided the policy is, in nats a token; it falls as the policy settles.",
        {"entropy": ("entropy", "actor/entropy")},
    ),
    _Wanted(
        "Response length",
        "Tokens of a response, and those among them that the agent wrote.",
        {"response": ("response_tokens", "response_length/mean"), "agent": ("agent_tokens",)},
    ),
    _Wanted(
        "Group filter",
        "Groups of samples generated in a step, and those that differ enough to learn from.",
        {"generated": ("groups_generated",), "kept": ("groups_kept",)},
    ),
    _Wanted(
        "Clipped tokens",
        "Share of trained tokens whose update the clip held back.",
        {"share": ("clip_fraction", "actor/pg_clipfrac")},
    ),
    _Wanted(
        "Mismatch",
        "KL between the rollout engine's and the trainer's probabilities of the same tokens.",
        {"KL": ("mismatch_kl", "rollout_corr/k3_kl")},
        only_some=True,
    ),
    _Wanted(
        "Value loss",
        "Of the critic, over the tokens the agent wrote.",
        {"loss": ("value_loss", "critic/vf_loss")},
        only_some=True,
    ),
    _Wanted(
        "Seconds a step",
        "Wall time: the whole step, and of it the rollout and the update of the policy.",
        {
            "step": ("seconds", "timing_s/step"),
            "rollout": ("rollout_seconds", "timing_s/gen"),
            "update": ("update_seconds", "timing_s/update_actor"),
        },
        only_some=True,
    ),
    _Wanted(
        "Questions by difficulty",
        "Questions asked so far, and those that are asked no more because every sample solves them.",
        {"asked": ("questions_asked",), "retired": ("questions_retired",)},
        only_some=True,
    ),
)


def read_curves(run_dir: Path) -> tuple[list[Curve], list[str]]:
    """The curves of ``sft/`` and ``rl/`` (or of one of the two itself), and a note for each series that is missing."""
    curves: list[Curve] = []
    notes: list[str] = []
    log = _first(run_dir / "sft" / TRAINER_LOG, run_dir / TRAINER_LOG)
    if log:
        line = _series("loss", ("loss",), training_rows(log, "current_steps"))
        if line is not None:
            caption = "Mean over the tokens the agent wrote; everything else is masked."
            curves.append(Curve("Loss of fine-tuning", "optimizer step", (line,), caption, y_from_zero=True))
        else:
            notes.append(f"{log.relative_to(run_dir)} holds no loss.")
    metrics = rl_metrics(run_dir)
    if metrics:
        rows = training_rows(metrics, "step")
        for wanted in (*_RL_CURVES, *_by_agent(rows)):
            curve, missing = _curve(wanted, rows)
            curves += [curve] if curve else []
            if not wanted.only_some:
                notes += [f"{metrics.relative_to(run_dir)} holds no series {key!r}." for key in missing]
    return curves, notes


def _by_agent(rows: Mapping[float, Mapping[str, Any]]) -> tuple[_Wanted, ...]:
    """Of a training with several agents: what each of them solves."""
    names = sorted({name for row in rows.values() for name in row.get("by_agent") or ()})

    def wanted(title: str, caption: str, begin: str) -> _Wanted:
        lines = {name: (f"{begin}/{name}/acc",) for name in names}
        return _Wanted(title, caption, lines, share=True, only_some=True)

    caption = "Share of each agent's sampled episodes, groups thrown away included."
    return (
        wanted("Solved by agent", caption, "agent"),
        wanted("Validation by agent", "Share of each agent's scored episodes.", "validation_agent"),
    )


def rl_metrics(run_dir: Path) -> Path | None:
    """The metrics of ``run_dir/rl``, or of ``run_dir`` itself."""
    return _first(run_dir / "rl" / RL_METRICS, run_dir / RL_METRICS)


def _first(*paths: Path) -> Path | None:
    return next((path for path in paths if path.exists()), None)


def _curve(wanted: _Wanted, rows: Mapping[float, Mapping[str, Any]]) -> tuple[Curve | None, list[str]]:
    by_label = {label: _series(label, keys, rows) for label, keys in wanted.lines.items()}
    missing = [wanted.lines[label][0] for label, series in by_label.items() if series is None]
    lines = tuple(series for series in by_label.values() if series is not None)
    if not lines:
        return None, missing
    values = [y for line in lines for y in line.y]
    top = 1.03 if wanted.share and max(values) <= 1 else None
    curve = Curve(
        wanted.title, "training step", lines, wanted.caption, y_from_zero=min(values) >= 0, y_max=top
    )
    return curve, missing


def _series(label: str, keys: Sequence[str], rows: Mapping[float, Mapping[str, Any]]) -> Series | None:
    points = [(step, value) for step, row in sorted(rows.items()) if (value := metric(row, keys)) is not None]
    if not points:
        return None
    return Series(label, tuple(x for x, _ in points), tuple(y for _, y in points))


def metric(row: Mapping[str, Any], keys: Sequence[str]) -> float | None:
    """The first finite number under one of ``keys``, in the row itself or among the engine's own names."""
    engine = row.get("engine") or row.get("data")
    for part in (row, engine if isinstance(engine, Mapping) else {}):
        for key in keys:
            value = part.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                return float(value)
    return None


def training_rows(path: Path, step_key: str) -> dict[float, Mapping[str, Any]]:
    """Rows of a log by step; what a resumed training logged again replaces the earlier, unreadable lines are left out."""
    rows: dict[float, Mapping[str, Any]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get(step_key), int | float):
            rows[float(row[step_key])] = row
    return rows


ALARMS_FILE = "alarms.jsonl"
"""Written by ``afm rl`` beside its metrics: step, alarm, action, message."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Aspect:
    """One thing that a healthy run keeps in bounds, with the steps and messages of the alarms about it."""

    name: str
    meaning: str
    first: float
    last: float
    low: float
    high: float
    alarms: tuple[str, ...] = ()


def read_health(run_dir: Path) -> tuple[Aspect, ...]:
    """The aspects that the run in ``run_dir`` (or its ``rl`` folder) has logged; empty without a log."""
    log = rl_metrics(run_dir)
    rows = [row for _, row in sorted(training_rows(log, "step").items())] if log else []
    alarms = _alarms(log.parent / ALARMS_FILE) if log else {}
    aspects = (_aspect(watched, rows, alarms) for watched in _WATCHED)
    return tuple(aspect for aspect in aspects if aspect)


@dataclass(frozen=True, slots=True)
class _Watched:
    """An aspect to look for: a series of the log, or its ratio to another one; ``alarm`` is about it."""

    name: str
    meaning: str
    key: str
    alarm: str = ""
    over: str = ""

    def value(self, row: Row) -> float | None:
        """Of one step."""
        value = metric(row, (self.key,))
        if value is None or not self.over:
            return value
        whole = metric(row, (self.over,))
        return value / whole if whole else None


_WATCHED = (
    _Watched("Reward", "should rise; with format or length falling it is suspect", "reward", "reward_hacking"),
    _Watched("Format valid", "share of the episodes; should stay or rise", "format", "reward_hacking"),
    _Watched("Entropy", "nats a token; near zero the policy explores no more", "entropy", "entropy_collapse"),
    _Watched("Mismatch", "KL between rollout engine and trainer; small", "mismatch_kl", "mismatch"),
    _Watched("Token drift", "tokens trained on that were not sampled so; always 0", "token_drift"),
    _Watched("Failed calls", "share of the tool calls", "tool_failures", "failed_tools", "tool_calls"),
    _Watched("Groups alike", "share without a signal", "groups_alike", "no_signal", "groups_generated"),
    _Watched("Thrown away", "share of the agent's tokens, in groups not trained on", "unused_share"),
    _Watched("Cut short", "share of the episodes that a limit ended", "cut_short"),
    _Watched("No score", "samples that the reward abstained from", "abstained_samples"),
    _Watched("Failed", "episodes that broke off with an error (failures.jsonl)", "failed_episodes"),
    _Watched("Long tail", "slowest episode, in mean ones", "slowest_episode_seconds", "long_tail", "episode_seconds"),
    _Watched("Clipped tokens", "share of the trained tokens", "clip_fraction"),
    _Watched("Gradient norm", "before clipping; jumps are a warning", "grad_norm"),
    _Watched("Seconds a step", "wall time", "seconds"),
    _Watched("Rollout", "share of a step's time", "rollout_seconds", over="seconds"),
)  # fmt: skip


def _aspect(watched: _Watched, rows: Sequence[Row], alarms: Mapping[str, tuple[str, ...]]) -> Aspect | None:
    values = [value for row in rows if (value := watched.value(row)) is not None]
    if not values:
        return None
    ends = values[0], values[-1], min(values), max(values)
    return Aspect(watched.name, watched.meaning, *ends, alarms.get(watched.alarm, ()))


def _alarms(file: Path) -> dict[str, tuple[str, ...]]:
    """What each alarm said; lines that cannot be read are left out."""
    messages: dict[str, tuple[str, ...]] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
            alarm, said = str(row["alarm"]), f"step {row['step']}: {row['message']}"
        except (ValueError, KeyError, TypeError):
            continue
        messages[alarm] = (*messages.get(alarm, ()), said)
    return messages


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
    scores = metrics.pass_at_k_intervals.values()
    lines = (
        Series(
            "pass@k",
            tuple(map(float, metrics.pass_at_k)),
            tuple(metrics.pass_at_k.values()),
            tuple(score.low for score in scores),
            tuple(score.high for score in scores),
        ),
        Series("pass^k", tuple(map(float, metrics.pass_hat_k)), tuple(metrics.pass_hat_k.values())),
        *_choices(metrics),
    )
    title = "Rounds" if alone else f"Rounds, {stage.name}"
    caption = (
        "Chance that one (pass@k) or each (pass^k) of k episodes of a question passes. "
        "The band is the 95 % interval of pass@k over questions."
    )
    return Curve(title, "episodes of a question, k", lines, caption, y_from_zero=True, y_max=1.03)


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
