"""The health of a reinforcement learning run, from its log and its alarms."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import mean
from typing import Any

from afm.evaluation.curves import metric, rl_metrics, training_rows
from afm.evaluation.page import plural

ALARMS_FILE = "alarms.jsonl"
"""Written by ``afm rl`` next to its metrics: step, alarm, action, message."""

Row = Mapping[str, Any]


class Status(StrEnum):
    """Status of an aspect. The value is its colour in the report."""

    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Aspect:
    """A figure that a healthy run keeps in bounds.

    Attributes:
        alarms: Steps and messages of its alarms.
        status: Bad after an alarm. A warning for a mean that fell or stayed flat, and for a count that should be 0.
        share: Whether the values are shares.
        trend: ``fell`` or ``flat`` where the values should have risen, ``high`` over their limit, otherwise empty.
    """

    name: str
    meaning: str
    first: float
    last: float
    low: float
    high: float
    alarms: tuple[str, ...] = ()
    status: Status = Status.NONE
    share: bool = False
    trend: str = ""

    @property
    def verdict(self) -> str:
        """The status in words."""
        if self.alarms:
            return plural(len(self.alarms), "alarm")
        words = {Status.GOOD: "ok", Status.WARN: "check", Status.BAD: "fault", Status.NONE: "–"}
        return self.trend or words[self.status]


def read_health(run_dir: Path) -> tuple[Aspect, ...]:
    """Return the aspects that ``run_dir`` or its ``rl`` folder has logged. Empty without a log."""
    log = rl_metrics(run_dir)
    rows = [row for _, row in sorted(training_rows(log, "step").items())] if log else []
    alarms = _alarms(log.parent / ALARMS_FILE) if log else {}
    aspects = (_aspect(watched, rows, alarms) for watched in _WATCHED)
    return tuple(aspect for aspect in aspects if aspect)


@dataclass(frozen=True, slots=True)
class _Watched:
    """An aspect to look for: a series of the log, or its ratio to the series ``over``.

    Attributes:
        alarm: Names of its alarms, if it has any.
        nonzero: Status if a step had more than 0. ``None`` where values above 0 are normal.
        share: Whether the values are shares.
        holds: Whether the mean should not fall.
        rises: Whether the mean should rise, unless it is near 1 already.
        most: Largest mean that is no warning.
    """

    name: str
    meaning: str
    key: str
    alarm: str = ""
    over: str = ""
    nonzero: Status | None = None
    share: bool = False
    holds: bool = False
    rises: bool = False
    most: float | None = None

    def value(self, row: Row) -> float | None:
        """Return the value of one step."""
        value = metric(row, (self.key,))
        if value is None or not self.over:
            return value
        whole = metric(row, (self.over,))
        return value / whole if whole else None


_WATCHED = (
    _Watched("Reward", "should rise; suspect if format or length falls meanwhile", "reward", "reward_hacking", holds=True, rises=True),
    _Watched("Valid format", "share of episodes; should not fall", "format", "format_collapse reward_hacking", share=True, holds=True),
    _Watched("Entropy", "nats per token; near zero the policy no longer explores", "entropy", "entropy_collapse"),
    _Watched("Engine mismatch", "KL between rollout engine and trainer, nats per token; an estimate, so it may be below 0", "mismatch_kl", "mismatch"),
    _Watched("Token drift", "trained tokens that differ from the sampled ones; should be 0", "token_drift", nonzero=Status.BAD),
    _Watched("Failed tool calls", "share of tool calls", "tool_failures", "failed_tools", "tool_calls", share=True),
    _Watched("Groups without signal", "share of groups whose samples all have the same score, so they teach nothing", "groups_alike", "no_signal", "groups_generated", share=True, most=0.8),
    _Watched("Discarded tokens", "share of the agent's tokens, in groups that were not trained on", "unused_share", share=True),
    _Watched("Cut off by a limit", "share of episodes", "cut_short", share=True),
    _Watched("Samples without a score", "number per step; the reward abstained", "abstained_samples", nonzero=Status.WARN),
    _Watched("Failed episodes", "number per step; they ended with an error (failures.jsonl)", "failed_episodes", nonzero=Status.WARN),
    _Watched("Slowest episode", "its time as a multiple of the mean", "slowest_episode_seconds", "long_tail", "episode_seconds"),
    _Watched("Clipped tokens", "share of trained tokens whose update was clipped", "clip_fraction", share=True),
    _Watched("Gradient norm", "before clipping; jumps are a warning", "grad_norm"),
    _Watched("Time per step", "wall time in seconds", "seconds"),
    _Watched("Rollout time", "share of the time of a step", "rollout_seconds", over="seconds", share=True),
)  # fmt: skip
_NOISE = 0.05
"""A mean that changes by less is flat."""
_NEAR_TOP = 0.95
"""A reward with this mean has little left to gain."""


def _aspect(watched: _Watched, rows: Sequence[Row], alarms: Mapping[str, tuple[str, ...]]) -> Aspect | None:
    values = [value for row in rows if (value := watched.value(row)) is not None]
    if not values:
        return None
    ends = values[0], values[-1], min(values), max(values)
    messages = tuple(message for name in watched.alarm.split() for message in alarms.get(name, ()))
    trend = _trend(watched, values)
    status = Status.GOOD if watched.alarm or watched.nonzero else Status.NONE
    if messages:
        status = Status.BAD
    elif watched.nonzero and max(values) > 0:
        status = watched.nonzero
    elif trend:
        status = Status.WARN
    return Aspect(watched.name, watched.meaning, *ends, messages, status, watched.share, trend)


def _trend(watched: _Watched, values: Sequence[float]) -> str:
    """``fell`` or ``flat`` where the mean of the last quarter is not where it should be, ``high`` for a mean over its limit."""
    if watched.most is not None and mean(values) > watched.most:
        return "high"
    quarter = max(1, len(values) // 4)
    before, after = mean(values[:quarter]), mean(values[-quarter:])
    if watched.holds and before - after > _NOISE:
        return "fell"
    return "flat" if watched.rises and after - before <= _NOISE and after < _NEAR_TOP else ""


def _alarms(file: Path) -> dict[str, tuple[str, ...]]:
    """Return the messages of each alarm. Lines that cannot be read are skipped."""
    messages: dict[str, tuple[str, ...]] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
            alarm, said = str(row["alarm"]), f"step {row['step']}: {row['message']}"
        except (ValueError, KeyError, TypeError):
            continue
        messages[alarm] = (*messages.get(alarm, ()), said)
    return messages
