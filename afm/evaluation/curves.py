"""Training curves from the logs the engines leave: LLaMA-Factory's and ours of ``afm rl``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm.evaluation.charts import Curve, Series

TRAINER_LOG = "trainer_log.jsonl"
RL_METRICS = "metrics.jsonl"


@dataclass(frozen=True, slots=True)
class _Line:
    """One series: its label and the keys under which a row may hold it, best first."""

    label: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Wanted:
    title: str
    caption: str
    lines: tuple[_Line, ...]
    share: bool = False
    y_from_zero: bool = True


_RL_CURVES = (
    _Wanted(
        "Reward",
        "Mean over every sampled episode of a step, groups thrown away included.",
        (_Line("reward", ("reward", "critic/score/mean")), _Line("answer right", ("correct",))),
        share=True,
    ),
    _Wanted(
        "Episodes that call a tool",
        "Share of sampled episodes with at least one call.",
        (_Line("share", ("tool_share",)),),
        share=True,
    ),
    _Wanted(
        "Entropy",
        "How undecided the policy is, in nats a token; it falls as the policy settles.",
        (_Line("entropy", ("entropy", "actor/entropy")),),
    ),
    _Wanted(
        "Response length",
        "Tokens of a response, and those among them that the agent wrote.",
        (
            _Line("response", ("response_tokens", "response_length/mean")),
            _Line("agent", ("agent_tokens",)),
        ),
    ),
    _Wanted(
        "Group filter",
        "Groups of samples generated in a step, and those that differ enough to learn from.",
        (_Line("generated", ("groups_generated",)), _Line("kept", ("groups_kept",))),
    ),
    _Wanted(
        "Clipped tokens",
        "Share of trained tokens whose update the clip held back.",
        (_Line("share", ("clip_fraction", "actor/pg_clipfrac")),),
    ),
)


def read_curves(run_dir: Path) -> tuple[list[Curve], list[str]]:
    """The curves of ``sft/`` and ``rl/``, and a note for each series that is missing."""
    curves: list[Curve] = []
    notes: list[str] = []
    log = run_dir / "sft" / TRAINER_LOG
    if log.exists():
        line = _series("loss", ("loss",), _rows(log, "current_steps"))
        if line is not None:
            caption = "Mean over the tokens the agent wrote; everything else is masked."
            curves.append(Curve("Loss of fine-tuning", "optimizer step", (line,), caption, y_from_zero=True))
        else:
            notes.append(f"sft/{TRAINER_LOG} holds no loss.")
    metrics = run_dir / "rl" / RL_METRICS
    if metrics.exists():
        rows = _rows(metrics, "step")
        for wanted in _RL_CURVES:
            curve, missing = _curve(wanted, rows)
            curves += [curve] if curve else []
            notes += [f"rl/{RL_METRICS} holds no series {key!r}." for key in missing]
    return curves, notes


def _curve(wanted: _Wanted, rows: Mapping[float, Mapping[str, Any]]) -> tuple[Curve | None, list[str]]:
    found = [(line, _series(line.label, line.keys, rows)) for line in wanted.lines]
    missing = [line.keys[0] for line, series in found if series is None]
    series = tuple(one for _, one in found if one is not None)
    if not series:
        return None, missing
    top = 1.03 if wanted.share and all(y <= 1 for one in series for y in one.y) else None
    zero = wanted.y_from_zero and all(y >= 0 for one in series for y in one.y)
    curve = Curve(wanted.title, "training step", series, wanted.caption, y_from_zero=zero, y_max=top)
    return curve, missing


def _series(label: str, keys: Sequence[str], rows: Mapping[float, Mapping[str, Any]]) -> Series | None:
    points = [(step, value) for step, row in sorted(rows.items()) if (value := _value(row, keys)) is not None]
    if not points:
        return None
    return Series(label, tuple(x for x, _ in points), tuple(y for _, y in points))


def _value(row: Mapping[str, Any], keys: Sequence[str]) -> float | None:
    """The first finite number under one of ``keys``, in the row itself or among the engine's own names."""
    engine = row.get("engine") or row.get("data")
    for part in (row, engine if isinstance(engine, Mapping) else {}):
        for key in keys:
            value = part.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                return float(value)
    return None


def _rows(path: Path, step_key: str) -> dict[float, Mapping[str, Any]]:
    """Rows by step; what a resumed training logged again replaces the earlier, unreadable lines are left out."""
    rows: dict[float, Mapping[str, Any]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get(step_key), int | float):
            rows[float(row[step_key])] = row
    return rows
