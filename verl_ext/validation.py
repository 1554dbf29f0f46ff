"""verl's own validation: its episodes are told apart from training's, and none is wrong for want of a score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from statistics import fmean
from types import ModuleType
from typing import Any

from verl_ext.compat import target
from verl_ext.guard import AGENT, AGENT_PARTS, PARTS, SAMPLER

_VALIDATING: ContextVar[bool] = ContextVar("afm_validating", default=False)


def validating() -> bool:
    """Whether the episode that asks belongs to a validation."""
    return _VALIDATING.get()


@contextmanager
def told(validate: bool) -> Iterator[None]:
    """Say to the episodes within whether they belong to a validation."""
    token = _VALIDATING.set(validate)
    try:
        yield
    finally:
        _VALIDATING.reset(token)


def mark_validation(module: ModuleType) -> None:
    """Let an agent loop know that its episode is one of a validation.

    Symptom: `leave_out` took truncated episodes out of validations too, and counted them as wrong.
    Cause: verl/experimental/agent_loop/agent_loop.py:694 tells the loop everything but that.
    """
    global _original
    worker = target(module, "AgentLoopWorker")
    if worker._run_agent_loop is not _run_agent_loop:
        _original = worker._run_agent_loop
        worker._run_agent_loop = _run_agent_loop


_original: Any = None
"""verl's method. Ray sends the methods of an actor to its processes: only one that a module holds arrives by its name, and
with the module's own state; any other as a copy, with copies of verl's registries."""


async def _run_agent_loop(self: Any, sampling_params: Any, trajectory: Any, **given: Any) -> Any:
    with told(bool(trajectory["validate"])):
        return await _original(self, sampling_params, trajectory, **given)


def average_scored_samples(module: ModuleType) -> None:
    """Let a validation's accuracy be a mean over the samples that have a score, and report means by names of ours.

    Symptom: a judge that abstained made the policy look worse.
    Cause: verl/trainer/ppo/metric_utils.py:971 counts each sample that is not there as wrong. With our sampler those are
    the ones without a score (verl_ext/sampler.py leaves them out), those that failed among them.
    """
    trainer = target(module, "PPOTrainer")
    original = trainer._val_metrics_update
    if getattr(original, "patched_by_afm", False):
        return

    def _val_metrics_update(
        self: Any,
        data_sources: Any,
        sample_uids: Any,
        facts: Any,
        turns: Any,
        expected_acc_counts: Any = None,
    ) -> Any:
        ours = str(self.config.trainer.v1.sampler.custom_sampler.path) == SAMPLER
        expected = None if ours else expected_acc_counts
        found = original(self, data_sources, sample_uids, facts, turns, expected_acc_counts=expected)
        return found | validation_means(data_sources, facts)

    _val_metrics_update.patched_by_afm = True  # type: ignore[attr-defined]
    trainer._val_metrics_update = _val_metrics_update


def validation_means(data_sources: Sequence[str], facts: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Means over all scored samples of a validation, and of the main facts over those of each source and each agent.

    Args:
        data_sources: Of each sample.
        facts: A list for each fact with a value for each sample; ``None`` where a sample does not have it.

    Returns:
        ``validation/FACT``, ``validation_source/SOURCE/PART`` and ``validation_agent/AGENT/PART``; :data:`verl_ext.metrics.NAMES` documents them.
    """
    found = {"validation/episodes": float(len(data_sources))}
    groups = (
        ("validation_source", PARTS, data_sources),
        ("validation_agent", AGENT_PARTS, facts.get(AGENT, [None] * len(data_sources))),
    )
    for name, values in facts.items():
        numbers = [float(value) if _number(value) else None for value in values]
        if known := [value for value in numbers if value is not None]:
            found[f"validation/{name}"] = fmean(known)
        for begin, parts, owners in groups:
            if name in parts:
                found |= {f"{begin}/{key}/{name}": mean for key, mean in _means_by(owners, numbers)}
    return found


def _means_by(owners: Sequence[Any], numbers: Sequence[float | None]) -> Iterator[tuple[str, float]]:
    by_owner: dict[str, list[float]] = {}
    for owner, number in zip(owners, numbers, strict=True):
        if owner and number is not None:
            by_owner.setdefault(owner, []).append(number)
    yield from ((owner, fmean(values)) for owner, values in sorted(by_owner.items()))


def _number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
