"""Curves of a report: of training runs (the logs of LLaMA-Factory and ``afm rl``) and of scores."""

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
SFT_MANIFEST = "sft_manifest.json"
"""It says of a run of ``afm sft`` whether it is finished."""
RL_METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A curve: its lines by label, each with the keys of a row that may hold it, best first.

    Attributes:
        unit: Label of the vertical axis.
        share: Whether values are shares. The axis then shows percent and ends at ``reach`` or 100 %.
        only_some: Whether only some runs have it, so that its absence needs no note.
        reach: Least end of the vertical axis, so that noise below it looks small.
    """

    title: str
    caption: str
    unit: str
    lines: Mapping[str, tuple[str, ...]]
    share: bool = False
    only_some: bool = False
    reach: float = 0.0


_RL_CURVES = (
    _Wanted(
        "Reward",
        "Mean over every sampled episode of a step, discarded groups included.",
        "reward",
        {"reward": ("reward", "critic/score/mean")},
        reach=1.0,
    ),
    _Wanted(
        "Right answers",
        "Share of the same episodes with a right answer, whatever else the reward counts.",
        "share of sampled episodes",
        {"answer right": ("correct",)},
        share=True,
    ),
    _Wanted(
        "Validation reward",
        "Mean over the scored episodes of each validation during training.",
        "reward",
        {"reward": ("validation_reward",)},
        only_some=True,
        reach=1.0,
    ),
    _Wanted(
        "Validation solved",
        "Share of the scored episodes of each validation that passed.",
        "share of scored episodes",
        {"solved": ("validation_solved",)},
        share=True,
        only_some=True,
    ),
    _Wanted(
        "Tool use",
        "Share of sampled episodes with at least one tool call.",
        "share of sampled episodes",
        {"share": ("tool_share",)},
        share=True,
    ),
    _Wanted(
        "Entropy",
        "How undecided the policy is. It falls as the policy settles.",
        "nats per token",
        {"entropy": ("entropy", "actor/entropy")},
    ),
    _Wanted(
        "Response length",
        "Tokens of a response, and how many of them the agent wrote.",
        "tokens per episode",
        {"response": ("response_tokens", "response_length/mean"), "agent": ("agent_tokens",)},
    ),
    _Wanted(
        "Groups of samples",
        "Groups generated in a step, and those kept because their samples differ in score.",
        "groups per step",
        {"generated": ("groups_generated",), "kept": ("groups_kept",)},
    ),
    _Wanted(
        "Clipped tokens",
        "Share of trained tokens whose update was clipped.",
        "share of trained tokens",
        {"share": ("clip_fraction", "actor/pg_clipfrac")},
        share=True,
        reach=0.05,
    ),
    _Wanted(
        "Mismatch",
        "KL between the rollout engine's and the trainer's probabilities of the same tokens.",
        "nats per token",
        {"KL": ("mismatch_kl", "rollout_corr/k3_kl")},
        only_some=True,
        reach=0.001,
    ),
    _Wanted(
        "Value loss",
        "Loss of the critic over the tokens the agent wrote.",
        "loss per token",
        {"loss": ("value_loss", "critic/vf_loss")},
        only_some=True,
    ),
    _Wanted(
        "Time per step",
        "Wall time of a step, and of its rollout and policy update.",
        "seconds",
        {
            "step": ("seconds", "timing_s/step"),
            "rollout": ("rollout_seconds", "timing_s/gen"),
            "update": ("update_seconds", "timing_s/update_actor"),
        },
        only_some=True,
    ),
    _Wanted(
        "Questions by difficulty",
        "Questions asked so far, and those no longer asked because every sample solves them.",
        "questions",
        {"asked": ("questions_asked",), "retired": ("questions_retired",)},
        only_some=True,
    ),
)


def read_curves(run_dir: Path) -> tuple[list[Curve], list[str]]:
    """Return the curves of ``sft/`` and ``rl/``, or of one of these folders, and a note for each missing series."""
    curves: list[Curve] = []
    notes: list[str] = []
    log = _first(run_dir / "sft" / TRAINER_LOG, run_dir / TRAINER_LOG)
    if log:
        steps = training_rows(log, "current_steps")
        line = _series("loss", ("loss",), steps)
        if line is not None:
            caption = "Mean over the tokens the agent wrote. Everything else is masked."
            if stopped := _stopped(log, steps):
                notes.append(f"{log.relative_to(run_dir)}: {stopped} Run the same `afm sft` again to resume.")
                caption += f" {stopped}"
            log_scale = min(line.y) > 0
            unit = f"nats per token{', log scale' if log_scale else ''}"
            curves.append(
                Curve("Loss of fine-tuning", "optimizer step", (line,), caption, unit, y_log=log_scale)
            )
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


def _stopped(log: Path, steps: Mapping[float, Mapping[str, Any]]) -> str:
    """Return a sentence about a fine-tuning that has not ended, empty for one that has."""
    last, total = max(steps), steps[max(steps)].get("total_steps")
    manifest = log.with_name(SFT_MANIFEST)
    ended = manifest.exists() and '"finished": null' not in manifest.read_text(encoding="utf-8")
    if ended or not isinstance(total, int | float):
        return ""
    return "" if last >= total else f"It stopped at step {last:,.0f} of {total:,.0f}, or is still running."


def _by_agent(rows: Mapping[float, Mapping[str, Any]]) -> tuple[_Wanted, ...]:
    """Curves of a training run with several agents: what each of them solves."""
    names = sorted({name for row in rows.values() for name in row.get("by_agent") or ()})

    def wanted(title: str, caption: str, begin: str) -> _Wanted:
        lines = {name: (f"{begin}/{name}/acc",) for name in names}
        return _Wanted(title, caption, "share of episodes", lines, share=True, only_some=True)

    caption = "Share of each agent's sampled episodes, discarded groups included."
    return (
        wanted("Solved by agent", caption, "agent"),
        wanted("Validation by agent", "Share of each agent's scored episodes.", "validation_agent"),
    )


def rl_metrics(run_dir: Path) -> Path | None:
    """Return the metrics file of ``run_dir/rl`` or of ``run_dir`` itself, if there is one."""
    return _first(run_dir / "rl" / RL_METRICS, run_dir / RL_METRICS)


def _first(*paths: Path) -> Path | None:
    return next((path for path in paths if path.exists()), None)


def _curve(wanted: _Wanted, rows: Mapping[float, Mapping[str, Any]]) -> tuple[Curve | None, list[str]]:
    by_label = {label: _series(label, keys, rows) for label, keys in wanted.lines.items()}
    missing = [wanted.lines[label][0] for label, series in by_label.items() if series is None]
    lines = tuple(series for series in by_label.values() if series is not None)
    if not lines:
        return None, missing
    share = wanted.share and all(0 <= y <= 1 for line in lines for y in line.y)
    curve = Curve(
        wanted.title, "training step", lines, wanted.caption, wanted.unit, share, y_reach=wanted.reach
    )
    return curve, missing


def _series(label: str, keys: Sequence[str], rows: Mapping[float, Mapping[str, Any]]) -> Series | None:
    points = [(step, value) for step, row in sorted(rows.items()) if (value := metric(row, keys)) is not None]
    if not points:
        return None
    return Series(label, tuple(x for x, _ in points), tuple(y for _, y in points))


def metric(row: Mapping[str, Any], keys: Sequence[str]) -> float | None:
    """Return the first finite number under one of ``keys``, in the row or among the names of the engine."""
    engine = row.get("engine") or row.get("data")
    for part in (row, engine if isinstance(engine, Mapping) else {}):
        for key in keys:
            value = part.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                return float(value)
    return None


def training_rows(path: Path, step_key: str) -> dict[float, Mapping[str, Any]]:
    """Return the rows of a log by step. If a step was logged twice, its last values count. Unreadable lines are skipped."""
    rows: dict[float, Mapping[str, Any]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get(step_key), int | float):
            step = float(row[step_key])
            rows[step] = {**rows.get(step, {}), **row}
    return rows


_AT_MOST = 4
"""Limit on the stages in one picture, which has as many colours."""


def score_curves(stages: Sequence[StageResult]) -> Iterator[Curve]:
    """Yield pass@k over k for every stage with several rounds, then cost against score. Captions count stages left out."""
    note = f" Only the first {_AT_MOST} of {len(stages)} runs are drawn." if len(stages) > _AT_MOST else ""
    for curve in _score_curves(stages[:_AT_MOST]):
        yield replace(curve, caption=curve.caption + note)


def _score_curves(shown: Sequence[StageResult]) -> Iterator[Curve]:
    for stage in shown:
        if stage.metrics.pass_at_k:
            yield _rounds(stage, alone=len(shown) == 1)
    if budgets := _budgets(shown):
        alone = f", {budgets[0].label}" if len(budgets) == 1 < len(shown) else ""
        yield Curve(
            f"Solved within a budget{alone}",
            "agent and observed tokens per episode",
            budgets,
            "Share of the scored episodes that passed with at most this many tokens. It ends at the share that passed at all.",
            "share of scored episodes",
            y_share=True,
            stepped=True,
        )
    money = tuple(line for stage in shown if (line := _money(stage)) is not None)
    points = tuple(point for stage in shown if (point := _point(stage)) is not None)
    if any(len(line.x) > 1 for line in money) or len(money) > 1:
        costs = replace(_COSTS, series=money, x_label="USD per question", x_whole=False)
        if any(len(line.x) > 1 for line in money):
            caption = "pass@k at the cost of k episodes, from k = 1, with its 95 % interval. Further left is cheaper."
            costs = replace(costs, y_label="pass@k", caption=caption)
        yield costs
    elif len(points) > 1:
        yield replace(_COSTS, series=points)


def _budgets(stages: Sequence[StageResult]) -> tuple[Series, ...]:
    """Return the share that each stage solves within a budget, over the same range: 0 below its cheapest episode."""
    known = [(stage.name, stage.scan) for stage in stages if stage.scan and stage.scan.tokens]
    budgets = [tokens for _, scan in known for tokens in scan.tokens]
    low, high = min(budgets, default=0.0), max(budgets, default=0.0)
    if low == high:
        return ()
    low, high = max(0.0, low - 0.05 * (high - low)), high + 0.05 * (high - low)
    return tuple(
        Series(name, (low, *scan.tokens, high), (0.0, *scan.solved, scan.solved[-1])) for name, scan in known
    )


_COSTS = Curve(
    "Cost against score",
    "tokens per episode, mean",
    (),
    "pass@1 with its 95 % interval. Further left is cheaper.",
    "pass@1",
    y_share=True,
    x_from_zero=True,
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
    return Curve(title, "episodes per question, k", lines, caption, "share of questions", y_share=True)


def _choices(metrics: Metrics) -> Iterator[Series]:
    if metrics.majority is not None:
        yield Series("majority vote", (float(metrics.rounds),), (metrics.majority,), points=True)
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
    """Return pass@k over the dollars of k episodes, or pass@1 for one round."""
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
