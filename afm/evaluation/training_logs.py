"""Logs of a training run: curves of LLaMA-Factory's and ours of ``afm rl``, and the run's health, aspect by aspect."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm.evaluation.page import Curve, Series

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

    return (
        wanted(
            "Solved by agent", "Share of each agent's sampled episodes, groups thrown away included.", "agent"
        ),
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
_Read = Callable[[Row], float | None]


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
    name: str
    meaning: str
    read: _Read
    alarm: str = ""


def _named(key: str) -> _Read:
    return lambda row: metric(row, (key,))


def _ratio(part: str, whole: str) -> _Read:
    def read(row: Row) -> float | None:
        above, below = metric(row, (part,)), metric(row, (whole,))
        return above / below if above is not None and below else None

    return read


_WATCHED = (
    _Watched("Reward", "should rise; with format or length falling it is suspect", _named("reward"), "reward_hacking"),
    _Watched("Format valid", "share of the episodes; should stay or rise", _named("format"), "reward_hacking"),
    _Watched("Entropy", "nats a token; near zero the policy explores no more", _named("entropy"), "entropy_collapse"),
    _Watched("Mismatch", "KL between rollout engine and trainer; small", _named("mismatch_kl"), "mismatch"),
    _Watched("Token drift", "tokens trained on that were not sampled so; always 0", _named("token_drift")),
    _Watched("Failed calls", "share of the tool calls", _ratio("tool_failures", "tool_calls"), "failed_tools"),
    _Watched("Groups alike", "share without a signal", _ratio("groups_alike", "groups_generated"), "no_signal"),
    _Watched("Thrown away", "share of the agent's tokens, in groups not trained on", _named("unused_share")),
    _Watched("Cut short", "share of the episodes that a limit ended", _named("cut_short")),
    _Watched("No score", "samples that the reward abstained from", _named("abstained_samples")),
    _Watched("Failed", "episodes that broke off with an error (failures.jsonl)", _named("failed_episodes")),
    _Watched("Long tail", "slowest episode, in mean ones", _ratio("slowest_episode_seconds", "episode_seconds"), "long_tail"),
    _Watched("Clipped tokens", "share of the trained tokens", _named("clip_fraction")),
    _Watched("Gradient norm", "before clipping; jumps are a warning", _named("grad_norm")),
    _Watched("Seconds a step", "wall time", _named("seconds")),
    _Watched("Rollout", "share of a step's time", _ratio("rollout_seconds", "seconds")),
)  # fmt: skip


def _aspect(watched: _Watched, rows: Sequence[Row], alarms: Mapping[str, tuple[str, ...]]) -> Aspect | None:
    values = [value for row in rows if (value := watched.read(row)) is not None]
    if not values:
        return None
    return Aspect(
        watched.name,
        watched.meaning,
        first=values[0],
        last=values[-1],
        low=min(values),
        high=max(values),
        alarms=alarms.get(watched.alarm, ()),
    )


def _alarms(file: Path) -> dict[str, tuple[str, ...]]:
    """What each alarm said; lines that cannot be read are left out."""
    messages: dict[str, tuple[str, ...]] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
            said = f"step {row['step']}: {row['message']}"
            messages[str(row["alarm"])] = (*messages.get(str(row["alarm"]), ()), said)
        except (ValueError, KeyError, TypeError):
            continue
    return messages
