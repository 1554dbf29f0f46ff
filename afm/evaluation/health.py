"""Whether a reinforcement-learning run is well: what its metrics and alarms say, aspect by aspect."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm.evaluation.curves import metric, rl_metrics, training_rows

ALARMS_FILE = "alarms.jsonl"
"""Written by ``afm rl`` beside its metrics: step, alarm, action, message."""

Row = Mapping[str, Any]
_Read = Callable[[Row], float | None]


@dataclass(frozen=True, slots=True)
class Aspect:
    """One thing that a healthy run keeps in bounds.

    Attributes:
        meaning: What it is, and what to expect of it.
        alarms: Steps and messages of the alarms about it.
    """

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
    found = (_aspect(watched, rows, alarms) for watched in _WATCHED)
    return tuple(aspect for aspect in found if aspect)


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
    found: dict[str, tuple[str, ...]] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
            said = f"step {row['step']}: {row['message']}"
            found[str(row["alarm"])] = (*found.get(str(row["alarm"]), ()), said)
        except (ValueError, KeyError, TypeError):
            continue
    return found
