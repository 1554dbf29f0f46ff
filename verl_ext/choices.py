"""Words of verl's configuration that choose one of several: verl finds a wrong one only when the trainer is up, or never."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from afm.errors import ConfigError, suggestion

CPU_ENGINE = "afm_cpu"
"""Name of our rollout engine: ``actor_rollout_ref.rollout.name=afm_cpu``."""

_KL = tuple(name + end for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for end in ("", "+"))
CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "algorithm.adv_estimator": (
        "gae",
        "gdpo",
        "gpg",
        "grpo",
        "grpo_passk",
        "grpo_vectorized",
        "opo",
        "optimal_token_baseline",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "rloo",
        "rloo_vectorized",
        "tir_optimal_token_baseline",
    ),
    "actor_rollout_ref.actor.policy_loss.loss_mode": (
        "bypass_mode",
        "cispo",
        "clip_cov",
        "dppo_kl",
        "dppo_tv",
        "dro",
        "geo_mean",
        "gpg",
        "gspo",
        "kl_cov",
        "sapo",
        "vanilla",
    ),
    "actor_rollout_ref.actor.loss_agg_mode": (
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ),
    "actor_rollout_ref.actor.kl_loss_type": _KL,
    "algorithm.kl_penalty": _KL,
    "algorithm.rollout_correction.rollout_is": ("token", "sequence", None),
    "trainer.v1.sampler.max_off_policy_strategy": ("drop", "wait"),
    "trainer.v1.trainer_mode": ("sync", "colocate_async", "separate_async"),
    "actor_rollout_ref.rollout.name": ("sglang", "vllm", CPU_ENGINE),
}
"""Key to the words of verl 0.9.1; engines are those whose stop parameters :mod:`verl_ext.server_model` knows."""

FACTS = (
    *(
        "reward",
        "score",
        "acc",
        "correct",
        "format",
        "overlong",
        "abstained",
        "answered",
        "cut_short",
        "used_tool",
    ),
    *(
        "tool_calls",
        "tool_failures",
        "duplicate_calls",
        "agent_tokens",
        "response_tokens",
        "seconds",
        "token_drift",
    ),
)
"""What our agent loop tells of each sample (:func:`verl_ext.samples.facts`), by which groups can be filtered."""

SHAPED = ("reward", "score", "overlong")
"""Those that hold the overlong penalty: they differ between answers that are equally wrong."""

_EXTENDABLE = ("algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode")


def check_choices(config: Any) -> None:
    """Refuse a word that verl does not know; modules of the caller's own may register estimators and losses.

    Raises:
        ConfigError: Names the key and what was probably meant.
    """
    from omegaconf import OmegaConf

    groups = config.algorithm.filter_groups
    if groups.enable and groups.metric not in FACTS:
        told = suggestion(str(groups.metric), FACTS)
        raise ConfigError(f"verl.algorithm.filter_groups.metric: got {groups.metric!r}; {told}")
    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
    extended = any(name.strip() not in ("", "verl_ext") for name in modules)
    for key, known in CHOICES.items():
        value = OmegaConf.select(config, key)
        if value not in known and not (extended and key in _EXTENDABLE):
            words = [word or "null" for word in known]
            raise ConfigError(f"verl.{key}: got {value!r}; {suggestion(str(value), words)}")
