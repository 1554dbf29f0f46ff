"""verl's own validation: which episodes belong to it, and the means over those that have a score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from statistics import fmean
from typing import Any

from verl_ext.guard import AGENT, AGENT_PARTS, PARTS

_VALIDATING: ContextVar[bool] = ContextVar("afm_validating", default=False)


def validating() -> bool:
    """Whether the episode that asks belongs to a validation."""
    return _VALIDATING.get()


@contextmanager
def validation(validate: bool) -> Iterator[None]:
    """Let the episodes within know whether they belong to a validation."""
    token = _VALIDATING.set(validate)
    try:
        yield
    finally:
        _VALIDATING.reset(token)


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
