"""Alarms on the metrics of each training step, for the common failures of reinforcement learning.

The YAML section ``alarms`` holds the thresholds. Each alarm warns, requests a checkpoint, or stops the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ConfigDict, Field, StrictInt, ValidationError

from afm.configuration import Settings
from afm.errors import DataError
from afm.runs.atomic import replace_text

ALARMS_FILE = "alarms.jsonl"
Rows = Sequence[Mapping[str, Any]]


class AlarmAction(StrEnum):
    """What an alarm does, once each time its condition begins to hold."""

    WARN = "warn"
    """Report it in the terminal and in ``alarms.jsonl``."""
    CHECKPOINT = "checkpoint"
    """Also save a checkpoint at the end of the current step."""
    STOP = "stop"
    """Also end the run with a checkpoint: that of the alarm's own step if it has one, else that of the next step."""


class Alarm(Settings):
    """One condition on the metrics."""

    model_config = ConfigDict(allow_inf_nan=False)

    steps: int = Field(default=3, ge=1)
    """Consecutive steps for which the condition must hold."""
    action: AlarmAction = AlarmAction.WARN
    """What the alarm does."""

    def look(self, rows: Rows) -> str | None:
        """Describe what is wrong at the last of ``rows``; ``None`` if nothing is wrong or a metric is absent."""
        raise NotImplementedError


class EntropyCollapse(Alarm):
    """The policy has almost stopped exploring: the entropy is below a share of its mean over the first steps."""

    steps: int = Field(default=5, ge=1)
    share_of_start: float = Field(default=0.1, gt=0, lt=1)
    first: int = Field(default=3, ge=1)

    def look(self, rows: Rows) -> str | None:
        """See :class:`Alarm`."""
        values = _values(rows, "entropy")
        if len(values) <= self.first:
            return None
        start = fmean(values[: self.first])
        if values[-1] >= self.share_of_start * start:
            return None
        return f"entropy fell to {values[-1]:.4f} from {start:.4f} at the start: raise clip_ratio_high, the temperature or entropy_coeff"


class Mismatch(Alarm):
    """Rollout engine and trainer assign different probabilities to the same tokens (KL, estimator k3)."""

    above: float = Field(default=0.01, gt=0)

    def look(self, rows: Rows) -> str | None:
        """See :class:`Alarm`."""
        value = rows[-1].get("mismatch_kl")
        if value is None or value <= self.above:
            return None
        return (
            f"KL between rollout engine and trainer is {value:.4f}, expected at most {self.above:g}: check that both use the "
            "same weights, data type and sampling parameters. Truncated importance sampling limits the harm"
        )


class RewardHacking(Alarm):
    """The reward jumps while format or length drops, which suggests a flaw in the reward rather than learning.

    Compares the means of the last ``window`` steps with those of the ``window`` steps before.
    """

    steps: int = Field(default=1, ge=1)
    window: int = Field(default=5, ge=1)
    jump: float = Field(default=0.15, gt=0)
    format_falls: float = Field(default=0.05, gt=0, lt=1)
    length_falls: float = Field(default=0.5, gt=0, lt=1)

    def look(self, rows: Rows) -> str | None:
        """See :class:`Alarm`."""
        reward, form, length = (self._change(rows, key) for key in ("reward", "format", "agent_tokens"))
        if reward is None or reward[1] - reward[0] < self.jump:
            return None
        signs = []
        if form and form[0] - form[1] >= self.format_falls:
            signs.append(f"format fell from {form[0]:.2f} to {form[1]:.2f}")
        if length and length[1] <= (1 - self.length_falls) * length[0]:
            signs.append(f"the agent's tokens fell from {length[0]:.0f} to {length[1]:.0f}")
        if not signs:
            return None
        return (
            f"the reward rose from {reward[0]:.2f} to {reward[1]:.2f} while {' and '.join(signs)}: read sampled "
            "episodes before you trust it, and try `afm reward --attack`"
        )

    def _change(self, rows: Rows, key: str) -> tuple[float, float] | None:
        values = _values(rows[-2 * self.window :], key)
        if len(values) < 2 * self.window:
            return None
        return fmean(values[: self.window]), fmean(values[self.window :])


class FormatCollapse(Alarm):
    """Fewer episodes keep the agent's format than before: the mean over ``window`` steps fell from its best."""

    steps: int = Field(default=1, ge=1)
    window: int = Field(default=5, ge=1)
    falls: float = Field(default=0.2, gt=0, lt=1)

    def look(self, rows: Rows) -> str | None:
        """See :class:`Alarm`."""
        known = [row for row in rows if row.get("format") is not None]
        values = _values(known, "format")
        means = [fmean(values[end - self.window : end]) for end in range(self.window, len(values) + 1)]
        if not means or max(means) - means[-1] < self.falls:
            return None
        best, last = means.index(max(means)), len(means) - 1
        steps = [f"steps {known[at]['step']} to {known[at + self.window - 1]['step']}" for at in (best, last)]
        return (
            f"format fell from {means[best]:.2f} ({steps[0]}) to {means[last]:.2f} ({steps[1]}): read the episodes of these "
            "steps, then continue from an earlier checkpoint with a lower learning rate (docs/rl.md, Alarms)"
        )


class FailedTools(Alarm):
    """Too many tool calls fail, so the agent learns to do without its tools."""

    above: float = Field(default=0.2, gt=0, lt=1)

    def look(self, rows: Rows) -> str | None:
        """See :class:`Alarm`."""
        calls, failures = rows[-1].get("tool_calls"), rows[-1].get("tool_failures")
        if not calls or failures is None or failures <= self.above * calls:
            return None
        return f"{failures / calls:.0%} of the tool calls fail, expected at most {self.above:.0%}: check the tool servers with `servers.sh status`"


class NoSignal(Alarm):
    """In nearly all groups every sample has the same reward, so most of the generated tokens are discarded."""

    steps: int = Field(default=5, ge=1)
    above: float = Field(default=0.9, gt=0, lt=1)

    def look(self, rows: Rows) -> str | None:
        """See :class:`Alarm`."""
        generated, alike = rows[-1].get("groups_generated"), rows[-1].get("groups_alike")
        if not generated or alike is None or alike <= self.above * generated:
            return None
        solved = rows[-1].get("groups_solved", 0.0)
        kind = "solved" if solved * 2 > alike else "failed"
        return f"all samples of {alike / generated:.0%} of the groups have the same reward, most are {kind}: change the questions' difficulty"


class LongTail(Alarm):
    """The whole step waits for a few episodes that take much longer than the others."""

    above: float = Field(default=10.0, gt=1)
    seconds: float = Field(default=60.0, gt=0)

    def look(self, rows: Rows) -> str | None:
        """See :class:`Alarm`."""
        mean, slowest = rows[-1].get("episode_seconds"), rows[-1].get("slowest_episode_seconds")
        if not mean or slowest is None or slowest < self.seconds or slowest <= self.above * mean:
            return None
        return f"the slowest episode took {slowest:.0f} s, the mean is {mean:.1f} s: set limits.max_seconds or max_tool_seconds"


class Alarms(Settings):
    """All alarms. ``null`` turns one off."""

    entropy_collapse: EntropyCollapse | None = EntropyCollapse()
    mismatch: Mismatch | None = Mismatch()
    reward_hacking: RewardHacking | None = RewardHacking()
    format_collapse: FormatCollapse | None = FormatCollapse()
    failed_tools: FailedTools | None = FailedTools()
    no_signal: NoSignal | None = NoSignal()
    long_tail: LongTail | None = LongTail()

    def without_weights(self) -> Alarms:
        """Return the alarms for an engine whose weights cannot be read: ``mismatch`` stops the run unless its action is set."""
        if self.mismatch is None or "action" in self.mismatch.model_fields_set:
            return self
        return self.model_copy(
            update={"mismatch": self.mismatch.model_copy(update={"action": AlarmAction.STOP})}
        )


_ALIKE = 0.8
"""Share of the groups of a run without signal above which the run could learn little."""


def little_signal(rows: Rows) -> str:
    """Say that most groups of a whole run taught nothing, which no single step need show; empty if enough did."""
    generated, alike, solved = (
        sum(_values(rows, f"groups_{key}")) for key in ("generated", "alike", "solved")
    )
    if alike <= _ALIKE * generated:
        return ""
    kind, other = ("solved", "harder") if solved * 2 > alike else ("failed", "easier")
    return (
        f"in {alike:.0f} of {generated:.0f} groups every answer had the same reward, and most of these were {kind}: the run "
        f"could learn little; take {other} questions, or select some with `afm data queries` (docs/data.md)"
    )


class RaisedAlarm(Settings):
    """A raised alarm: one line of ``alarms.jsonl``."""

    step: StrictInt
    alarm: str
    action: AlarmAction
    message: str


class Watch:
    """Checks the metrics of each step once.

    Args:
        alarms: The alarms to check.
        rows: Metrics of the steps that earlier starts of the run finished.
        file: Raised alarms are appended to it. Alarms after the last of ``rows`` are removed, because those steps run again.
    """

    def __init__(self, alarms: Alarms, rows: Rows, file: Path) -> None:
        self._alarms = {name: alarm for name in Alarms.model_fields if (alarm := getattr(alarms, name))}
        self._rows = list(rows)
        self._file = file
        last = max((row["step"] for row in rows), default=0)
        kept = [alarm for alarm in read_alarms(file) if alarm.step <= last]
        if file.exists():
            replace_text(file, "".join(map(_line, kept)))

    def look(self, row: Mapping[str, Any]) -> list[RaisedAlarm]:
        """Return the alarms whose condition begins to hold with this step."""
        self._rows.append(row)
        raised = []
        for name, alarm in self._alarms.items():
            message = self._begins(alarm)
            if message is not None:
                raised.append(RaisedAlarm(step=row["step"], alarm=name, action=alarm.action, message=message))
        if raised:
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(map(_line, raised))
        return raised

    def _begins(self, alarm: Alarm) -> str | None:
        """Return the message once the condition has held for exactly ``steps`` steps, and not again while it continues."""
        message = alarm.look(self._rows)
        if message is None or len(self._rows) < alarm.steps:
            return None
        ends = [len(self._rows) - back for back in range(1, alarm.steps + 1)]
        held = [end > 0 and alarm.look(self._rows[:end]) is not None for end in ends]
        return message if all(held[:-1]) and not held[-1] else None


def read_alarms(file: Path) -> list[RaisedAlarm]:
    """Return the alarms of a run in order. A half-written last line is ignored.

    Raises:
        DataError: A line does not hold an alarm.
    """
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    return [_parse_alarm(file, number, line) for number, line in enumerate(whole, 1)]


def _parse_alarm(file: Path, number: int, line: str) -> RaisedAlarm:
    try:
        return RaisedAlarm.model_validate_json(line)
    except ValidationError:
        message = f"expected an alarm of a step, got {line.strip()[:60]!r}; remove the line, or choose another output_dir"
        raise DataError(message, path=str(file), line=number) from None


def _line(alarm: RaisedAlarm) -> str:
    return alarm.model_dump_json() + "\n"


def _values(rows: Rows, key: str) -> list[float]:
    return [float(row[key]) for row in rows if row.get(key) is not None]
