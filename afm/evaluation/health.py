"""The health of a reinforcement learning run: what its log and its alarms say about it."""

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
        status: Bad after an alarm, good without one. A mean that fell and counts that should stay 0 warn; others have no status.
        share: Whether the values are shares.
        fell: Whether it should stay or rise, and fell.
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
    fell: bool = False

    @property
    def verdict(self) -> str:
        """The status in words."""
        if self.alarms:
            return plural(len(self.alarms), "alarm")
        if self.fell:
            return "fell"
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
        share: Whether its values are shares.
        rises: Whether it should stay or rise.
    """

    name: str
    meaning: str
    key: str
    alarm: str = ""
    over: str = ""
    nonzero: Status | None = None
    share: bool = False
    rises: bool = False

    def value(self, row: Row) -> float | None:
        """Of one step."""
        value = metric(row, (self.key,))
        if value is None or not self.over:
            return value
        whole = metric(row, (self.over,))
        return value / whole if whole else None


_WATCHED = (
    _Watched("Reward", "should rise; suspect if format or length falls meanwhile", "reward", "reward_hacking", rises=True),
    _Watched("Format valid", "episodes in a valid format; should stay or rise", "format", "reward_hacking", share=True, rises=True),
    _Watched("Entropy", "nats per token; near zero the policy no longer explores", "entropy", "entropy_collapse"),
    _Watched("Mismatch", "KL between rollout engine and trainer, nats per token; an estimate, so it may be below 0", "mismatch_kl", "mismatch"),
    _Watched("Token drift", "trained tokens that differ from the sampled ones; should be 0", "token_drift", nonzero=Status.BAD),
    _Watched("Failed calls", "tool calls that failed", "tool_failures", "failed_tools", "tool_calls", share=True),
    _Watched("Groups alike", "groups whose samples all score the same, which teach nothing", "groups_alike", "no_signal", "groups_generated", share=True),
    _Watched("Discarded", "the agent's tokens in groups that were not trained on", "unused_share", share=True),
    _Watched("Cut short", "episodes that a limit ended", "cut_short", share=True),
    _Watched("No score", "samples that the reward gave no score", "abstained_samples", nonzero=Status.WARN),
    _Watched("Failed", "episodes that ended with an error (failures.jsonl)", "failed_episodes", nonzero=Status.WARN),
    _Watched("Long tail", "time of the slowest episode, as a multiple of the mean", "slowest_episode_seconds", "long_tail", "episode_seconds"),
    _Watched("Clipped tokens", "trained tokens whose update the clip limited", "clip_fraction", share=True),
    _Watched("Gradient norm", "before clipping; jumps are a warning", "grad_norm"),
    _Watched("Seconds per step", "wall time", "seconds"),
    _Watched("Rollout", "part of a step's time", "rollout_seconds", over="seconds", share=True),
)  # fmt: skip
_FALL = 0.05
"""A fall of a mean by less than this is noise."""


def _aspect(watched: _Watched, rows: Sequence[Row], alarms: Mapping[str, tuple[str, ...]]) -> Aspect | None:
    values = [value for row in rows if (value := watched.value(row)) is not None]
    if not values:
        return None
    ends = values[0], values[-1], min(values), max(values)
    messages = alarms.get(watched.alarm, ())
    quarter = max(1, len(values) // 4)
    fell = watched.rises and mean(values[:quarter]) - mean(values[-quarter:]) > _FALL
    status = Status.GOOD if watched.alarm or watched.nonzero else Status.NONE
    if messages:
        status = Status.BAD
    elif watched.nonzero and max(values) > 0:
        status = watched.nonzero
    elif fell:
        status = Status.WARN
    return Aspect(watched.name, watched.meaning, *ends, messages, status, watched.share, fell)


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
