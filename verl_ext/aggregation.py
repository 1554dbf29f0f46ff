"""How our metrics of several updates become those of one step, in verl's ``separate_async`` trainer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from verl_ext.compat import target

UNUSED_SHARE, TOKENS = "groups/unused_share", "groups/agent_tokens"
_KINDS = (
    (re.compile(UNUSED_SHARE), "weighted_avg"),
    (re.compile(r"groups/.*"), "sum"),
    (re.compile(r"curriculum/.*"), "last"),
    (re.compile(r"rollout/slowest_seconds"), "max"),
    (re.compile(r"(source|validation_source)/.*|(rollout|validation)/[^/]*", re.DOTALL), "weighted_avg"),
)


def kind_of(name: str) -> str | None:
    """What verl calls the way in which a metric of ours is put together; ``None`` for one of its own."""
    return next((kind for pattern, kind in _KINDS if pattern.fullmatch(name)), None)


def put_our_metrics_together(module: ModuleType) -> None:
    """Count what is counted, and average what is a mean, over the updates of a step.

    Symptom: counts of groups were averages, the slowest episode was a mean, ``source/minerva_math/score`` a minimum.
    Cause: verl/trainer/ppo/v1/utils.py:83 goes by parts of a metric's name: "max", "min", "sum", "total", else a mean. Means
    are weighted by the samples trained on in each update; the unused share by the tokens of which it is one.
    """
    aggregator = target(module, "MetricsAggregator")
    kind, weight = target(aggregator, "_get_aggregation_type"), target(aggregator, "_get_metric_weight")
    if getattr(kind, "patched_by_afm", False):
        return

    def _get_aggregation_type(self: Any, metric_name: str) -> str:
        return kind_of(metric_name) or str(kind(self, metric_name))

    def _get_metric_weight(self: Any, metric_name: str, metrics: Mapping[str, Any], sample_count: int) -> int:
        if metric_name == UNUSED_SHARE and TOKENS in metrics:
            return int(metrics[TOKENS])
        return int(weight(self, metric_name, metrics, sample_count))

    _get_aggregation_type.patched_by_afm = True  # type: ignore[attr-defined]
    aggregator._get_aggregation_type = _get_aggregation_type
    aggregator._get_metric_weight = _get_metric_weight
