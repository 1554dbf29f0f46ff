"""Metrics of a training step: documented names in ``metrics.jsonl``, a line in the terminal, means of a validation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import Any

from afm.errors import DataError
from afm.runs.atomic import replace_text
from verl_ext.checkpoints import CHECKPOINT_DIR, stored_metrics
from verl_ext.group_guard import AGENT, AGENT_PARTS, PARTS

METRICS_FILE = "metrics.jsonl"
ENGINE_LOG = "engine_metrics.jsonl"
"""verl's metric file. Every start overwrites it, so :class:`MetricsLog` copies it line by line."""

NAMES = {
    "reward": "rollout/score",
    "correct": "rollout/correct",
    "format": "rollout/format",
    "overlong": "rollout/overlong",
    "tool_calls": "rollout/tool_calls",
    "tool_share": "rollout/used_tool",
    "tool_failures": "rollout/tool_failures",
    "agent_tokens": "rollout/agent_tokens",
    "response_tokens": "rollout/response_tokens",
    "cut_short": "rollout/cut_short",
    "trajectories": "rollout/trajectories",
    "branches": "rollout/branches",
    "episode_seconds": "rollout/seconds",
    "slowest_episode_seconds": "rollout/slowest_seconds",
    "token_drift": "rollout/token_drift",
    "batch_reward": "critic/score/mean",
    "entropy": "actor/entropy",
    "grad_norm": "actor/grad_norm",
    "policy_loss": "actor/pg_loss",
    "clip_fraction": "actor/pg_clipfrac",
    "clip_fraction_lower": "actor/pg_clipfrac_lower",
    "kl": "actor/ppo_kl",
    "learning_rate": "actor/lr",
    "value_loss": "critic/vf_loss",
    "groups_generated": "groups/generated",
    "groups_kept": "groups/kept",
    "groups_alike": "groups/alike",
    "groups_solved": "groups/alike_solved",
    "groups_fillers": "groups/fillers",
    "groups_surplus": "groups/surplus",
    "abstained_samples": "groups/abstained_samples",
    "failed_episodes": "groups/failed_samples",
    "program_timeouts": "harness/timeout",
    "program_crashes": "harness/crashed",
    "program_floods": "harness/output",
    "program_silences": "harness/silent",
    "program_retries": "harness/retries",
    "program_leftovers": "harness/left_behind",
    "generated_tokens": "groups/agent_tokens",
    "unused_share": "groups/unused_share",
    "questions_asked": "curriculum/asked",
    "questions_retired": "curriculum/retired",
    "questions_solve_rate": "curriculum/solve_rate",
    "teacher_kl": "teacher/reverse_kl",
    "teacher_clipped": "teacher/clipped",
    "mismatch_kl": "rollout_corr/k3_kl",
    "probs_diff_max": "training/rollout_probs_diff_max",
    "seconds": "timing_s/step",
    "rollout_seconds": "timing_s/gen",
    "old_log_prob_seconds": "timing_s/old_log_prob",
    "update_seconds": "timing_s/update_actor",
    "sync_seconds": "timing_s/update_weights",
    "validation_episodes": "validation/episodes",
    "validation_reward": "validation/score",
    "validation_solved": "validation/acc",
    "validation_correct": "validation/correct",
    "validation_format": "validation/format",
    "validation_overlong": "validation/overlong",
    "validation_tool_calls": "validation/tool_calls",
    "validation_tool_failures": "validation/tool_failures",
    "validation_agent_tokens": "validation/agent_tokens",
    "validation_cut_short": "validation/cut_short",
    "validation_seconds": "timing_s/testing",
}
"""Maps our name of a metric to the trainer's. Rollout values are means over every scored sample of the step, including
discarded groups. ``entropy`` is the mean over the tokens trained on, in nats, in every ``loss_agg_mode``
(:func:`verl_ext.patches.report_entropy_of_a_token`). ``policy_loss`` has the unit of that mode. ``batch_reward`` and
everything from ``actor/`` are values of the trained batch. ``groups_surplus`` counts usable groups that finished when
the step was already full. ``program_`` values count how the attempts of a harness ended (:mod:`afm.harness.episode`).
``trajectories`` is the number per episode. ``validation_`` values are means over the scored episodes of verl's own
validation (``val_files``), in the lines of the steps that ``trainer.test_freq`` names. ``solved`` is
``correct * format``."""


_GROUPED = {
    "by_source": "source/",
    "by_agent": "agent/",
    "validation_by_source": "validation_source/",
    "validation_by_agent": "validation_agent/",
}
"""Metrics nested by data source, and by agent in runs of several: our name to the prefix of the trainer's names."""


def documented(step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of ``metrics.jsonl``: ``step``, our names, nested values, and the trainer's names under ``engine``."""
    named: dict[str, Any] = {name: values[key] for name, key in NAMES.items() if key in values}
    for name, begin in _GROUPED.items():
        by_source: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            if key.startswith(begin):
                source, _, part = key.removeprefix(begin).rpartition("/")
                by_source.setdefault(source, {})[part] = value
        if by_source:
            named[name] = by_source
    return {"step": step, **named, "engine": dict(values)}


def progress_line(row: Mapping[str, Any], total_steps: int) -> str:
    """Describe a step in one line for the terminal."""
    shown = [f"step {row['step']}/{total_steps}"]
    for name, title in (
        ("reward", "reward"),
        ("correct", "correct"),
        ("format", "format"),
        ("tool_calls", "tool calls"),
        ("entropy", "entropy"),
    ):
        if name in row:
            shown.append(f"{title} {row[name]:.3f}")
    if "validation_solved" in row:
        shown.append(f"validation solved {row['validation_solved']:.3f}")
    if row.get("groups_kept", 0) < row.get("groups_generated", 0):
        shown.append(f"scores differ in {row['groups_kept']:.0f} of {row['groups_generated']:.0f} groups")
    if "seconds" in row:
        shown.append(f"{row['seconds']:.1f} s")
    return "  ".join(shown)


class MetricsLog:
    """Converts the trainer's metric file to ours, line by line, over any number of restarts.

    Args:
        output_dir: Folder of both files.
        resume_step: The run resumes after this step. Lines of later steps are removed, because those steps run again.
    """

    def __init__(self, output_dir: Path, resume_step: int) -> None:
        self._path = output_dir / METRICS_FILE
        self._source = output_dir / ENGINE_LOG
        self._offset = 0
        kept = [row for row in read_metrics(self._path) if row["step"] <= resume_step]
        # Steps that the trainer logged after the launcher had ended.
        seen = {row["step"] for row in kept}
        kept += [row for row in self._new_rows() if row["step"] <= resume_step and row["step"] not in seen]
        if resume_step not in {row["step"] for row in kept}:
            # The trainer was killed after it saved the step and before it logged it, for example in a validation.
            values = stored_metrics(output_dir / CHECKPOINT_DIR / f"global_step_{resume_step}")
            kept += [documented(resume_step, values)] if values else []
        replace_text(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        self._source.unlink(missing_ok=True)
        self._offset = 0
        self._known = {row["step"] for row in kept}

    def follow(self) -> Iterator[dict[str, Any]]:
        """Append the lines since the last call to our file, and yield them.

        Each step has one line, although the validation before a resumed training reports the checkpoint's step again.
        """
        for row in self._new_rows():
            if row["step"] in self._known:
                continue
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            yield row

    def _new_rows(self) -> list[dict[str, Any]]:
        if not self._source.exists():
            return []
        with self._source.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = _steps(self._source, whole.decode("utf-8").splitlines())
        return [documented(row["step"], row["data"]) for row in rows]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl`` in order. A half-written last line is ignored.

    Raises:
        DataError: A line does not hold the metrics of a step.
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return _steps(path, text[: text.rfind("\n") + 1].splitlines())


def _steps(path: Path, lines: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            message = f"expected the metrics of a step, got {line[:60]!r}; remove the line, or choose another output_dir"
            raise DataError(message, path=str(path), line=number)
        rows.append(row)
    return rows


UNUSED_SHARE, AGENT_TOKENS = "groups/unused_share", "groups/agent_tokens"
_AGGREGATIONS = (
    (re.compile(UNUSED_SHARE), "weighted_avg"),
    (re.compile(r"(groups|harness)/.*"), "sum"),
    (re.compile(r"curriculum/.*"), "last"),
    (re.compile(r"rollout/slowest_seconds"), "max"),
    (re.compile(r"(source|validation_source)/.*|(rollout|validation)/[^/]*", re.DOTALL), "weighted_avg"),
)


def aggregation_of(name: str) -> str | None:
    """Return verl's name of the aggregation of one of our metrics, ``None`` for one of verl's metrics."""
    return next((way for pattern, way in _AGGREGATIONS if pattern.fullmatch(name)), None)


_VALIDATING: ContextVar[bool] = ContextVar("afm_validating", default=False)


def validating() -> bool:
    """Return whether the current episode belongs to a validation."""
    return _VALIDATING.get()


@contextmanager
def validation(validate: bool) -> Iterator[None]:
    """Mark the episodes inside the block as part of validation or of training."""
    token = _VALIDATING.set(validate)
    try:
        yield
    finally:
        _VALIDATING.reset(token)


def validation_means(data_sources: Sequence[str], facts: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Return the means of a validation over all scored samples, and the main ones per data source and agent.

    Args:
        data_sources: Data source of each sample.
        facts: One list per fact, with a value per sample. The value is ``None`` if a sample lacks the fact.

    Returns:
        ``validation/FACT``, ``validation_source/SOURCE/PART`` and ``validation_agent/AGENT/PART``, as documented in
        :data:`verl_ext.metrics.NAMES`.
    """
    means = {"validation/episodes": float(len(data_sources))}
    groups = (
        ("validation_source", PARTS, data_sources),
        ("validation_agent", AGENT_PARTS, facts.get(AGENT, [None] * len(data_sources))),
    )
    for name, values in facts.items():
        numbers = [float(value) if _number(value) else None for value in values]
        if known := [value for value in numbers if value is not None]:
            means[f"validation/{name}"] = fmean(known)
        for begin, parts, owners in groups:
            if name in parts:
                means |= {f"{begin}/{key}/{name}": mean for key, mean in _means_by(owners, numbers)}
    return means


def _means_by(owners: Sequence[Any], numbers: Sequence[float | None]) -> Iterator[tuple[str, float]]:
    by_owner: dict[str, list[float]] = {}
    for owner, number in zip(owners, numbers, strict=True):
        if owner and number is not None:
            by_owner.setdefault(owner, []).append(number)
    yield from ((owner, fmean(values)) for owner, values in sorted(by_owner.items()))


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
