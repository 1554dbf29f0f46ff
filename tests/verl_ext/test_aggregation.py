"""Metrics of several updates become those of one step: on verl's own aggregator."""

from __future__ import annotations

from types import ModuleType

import pytest

from afm.errors import EngineError
from verl_ext.aggregation import kind_of, put_our_metrics_together

pytest.importorskip("verl")


@pytest.fixture
def aggregator():
    from verl.trainer.ppo.v1 import utils

    module = ModuleType("upstream")
    module.MetricsAggregator = type("MetricsAggregator", (utils.MetricsAggregator,), {})
    put_our_metrics_together(module)
    put_our_metrics_together(module)
    return module.MetricsAggregator()


def test_counts_are_added_and_means_weighted_whatever_their_names_hold(aggregator) -> None:
    first = {
        "groups/generated": 10.0, "groups/kept": 4.0, "groups/agent_tokens": 300.0, "groups/unused_share": 0.5,
        "rollout/score": 0.2, "rollout/summary": 1.0, "rollout/slowest_seconds": 9.0,
        "source/minerva_math/score": 0.8, "source/maximum/correct": 0.0, "curriculum/asked": 5.0,
        "validation/total": 0.5, "actor/grad_norm_max": 2.0, "training/global_step": 7,
    }  # fmt: skip
    second = {
        "groups/generated": 6.0, "groups/kept": 4.0, "groups/agent_tokens": 100.0, "groups/unused_share": 0.1,
        "rollout/score": 0.6, "rollout/summary": 2.0, "rollout/slowest_seconds": 4.0,
        "source/minerva_math/score": 0.4, "source/maximum/correct": 1.0, "curriculum/asked": 8.0,
        "validation/total": 0.5, "actor/grad_norm_max": 3.0, "training/global_step": 8,
    }  # fmt: skip
    aggregator.add_step_metrics(first, sample_count=30)
    aggregator.add_step_metrics(second, sample_count=10)
    found = aggregator.get_aggregated_metrics()
    assert found == pytest.approx(
        {
            "groups/generated": 16.0, "groups/kept": 8.0, "groups/agent_tokens": 400.0,
            "groups/unused_share": 0.4,  # (150 + 10) of 400 tokens
            "rollout/score": 0.3, "rollout/summary": 1.25, "rollout/slowest_seconds": 9.0,
            "source/minerva_math/score": 0.7, "source/maximum/correct": 0.25, "curriculum/asked": 8.0,
            "validation/total": 0.5, "actor/grad_norm_max": 3.0, "training/global_step": 8.0,
        }
    )  # fmt: skip


def test_verls_own_metrics_stay_as_they_are() -> None:
    theirs = (
        "validation/off_policy/evicted_samples", "training/filter_groups/evicted_samples", "timing_s/gen", "actor/lr",
        "rollout/moe/load_max", "rollout_corr/k3_kl", "critic/score/min",
    )  # fmt: skip
    assert [kind_of(name) for name in theirs] == [None] * len(theirs)


def test_a_patch_whose_target_is_gone_fails_loudly() -> None:
    with pytest.raises(EngineError, match="upstream has no MetricsAggregator"):
        put_our_metrics_together(ModuleType("upstream"))
