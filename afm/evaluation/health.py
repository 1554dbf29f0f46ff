"""The health of a reinforcement learning run: what its log and its alarms say about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from afm.evaluation.curves import metric, rl_metrics, training_rows
from afm.evaluation.page import plural

ALARMS_FILE = "alarms.jsonl"
"""Written by ``afm rl`` next to its metrics: step, alarm, action, message."""

Row = Mapping[str, Any]


class Status(StrEnum):
    """How an aspect of a training looks. The value is its colour in the report."""

    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Aspect:
    """One thing that a healthy run keeps in bounds.

    Attributes:
        alarms: Steps and messages of the alarms about it.
        status: Bad after an alarm, good without one. Counts that should stay 0 warn; others have no status.
    """

    name: str
    meaning: str
    first: float
    last: float
    low: float
    high: float
    alarms: tuple[str, ...] = ()
    status: Status = Status.NONE

    @property
    def verdict(self) -> str:
        """The status in words."""
        if self.alarms:
            return plural(len(self.alarms), "alarm")
        return {Status.GOOD: "ok", Status.WARN: "look", Status.BAD: "fault", Status.NONE: "–"}[self.status]


def read_health(run_dir: Path) -> tuple[Aspect, ...]:
    """The aspects that the run in ``run_dir`` (or its ``rl`` folder) has logged; empty without a log."""
    log = rl_metrics(run_dir)
    rows = [row for _, row in sorted(training_rows(log, "step").items())] if log else []
    alarms = _alarms(log.parent / ALARMS_FILE) if log else {}
    aspects = (_aspect(watched, rows, alarms) for watched in _WATCHED)
    return tuple(aspect for aspect in aspects if aspect)


@dataclass(frozen=True, slots=True)
class _Watched:
    """An aspect to look for: a series of the log, or its ratio to another one (``over``).

    Attributes:
        alarm: The alarm that is about it, if any.
        nonzero: Its status when a step had more than 0; without one, 0 is not what is expected.
    """

    name: str
    meaning: str
    key: str
    alarm: str = ""
    over: str = ""
    nonzero: Status | None = None

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
    _Watched("Entropy", "nats per token; near zero the policy no longer explores", "entropy", "entropy_collapse"),
    _Watched("Mismatch", "KL between rollout engine and trainer; small", "mismatch_kl", "mismatch"),
    _Watched("Token drift", "trained tokens that differ from the sampled ones; always 0", "token_drift", nonzero=Status.BAD),
    _Watched("Failed calls", "share of the tool calls", "tool_failures", "failed_tools", "tool_calls"),
    _Watched("Groups alike", "share without a signal", "groups_alike", "no_signal", "groups_generated"),
    _Watched("Discarded", "share of the agent's tokens, in groups not trained on", "unused_share"),
    _Watched("Cut short", "share of the episodes that a limit ended", "cut_short"),
    _Watched("No score", "samples that the reward abstained from", "abstained_samples", nonzero=Status.WARN),
    _Watched("Failed", "episodes that ended with an error (failures.jsonl)", "failed_episodes", nonzero=Status.WARN),
    _Watched("Long tail", "slowest episode over the mean one", "slowest_episode_seconds", "long_tail", "episode_seconds"),
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
    messages = alarms.get(watched.alarm, ())
    status = Status.GOOD if watched.alarm or watched.nonzero else Status.NONE
    if messages:
        status = Status.BAD
    elif watched.nonzero and max(values) > 0:
        status = watched.nonzero
    return Aspect(watched.name, watched.meaning, *ends, messages, status)


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
