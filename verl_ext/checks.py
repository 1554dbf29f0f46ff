"""Checks of verl's configuration: words that choose one of several, batch sizes, splits and token budgets.

verl finds these faults only when the trainer is up, or never.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from afm.errors import ConfigError, suggestion
from verl_ext.workload import check_sizes

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
"""What our agent loop reports of each sample (:func:`verl_ext.training_sample.facts`), by which groups can be filtered."""

SHAPED = ("reward", "score", "overlong")
"""Those that hold the overlong penalty: they differ between answers that are equally wrong."""

_EXTENDABLE = ("algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode")


def _check_choices(config: Any) -> None:
    """Refuse a word that verl does not know; modules of the caller's own may register estimators and losses.

    Raises:
        ConfigError: Names the key and what was probably meant.
    """
    from omegaconf import OmegaConf

    groups = config.algorithm.filter_groups
    if groups.enable and groups.metric not in FACTS:
        advice = suggestion(str(groups.metric), FACTS)
        raise ConfigError(f"verl.algorithm.filter_groups.metric: got {groups.metric!r}; {advice}")
    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
    extended = any(name.strip() not in ("", "verl_ext") for name in modules)
    for key, known in CHOICES.items():
        value = OmegaConf.select(config, key)
        if value not in known and not (extended and key in _EXTENDABLE):
            words = [word or "null" for word in known]
            raise ConfigError(f"verl.{key}: got {value!r}; {suggestion(str(value), words)}")


def check(config: Any) -> None:
    """Words and arithmetic that verl finds out about late or not at all.

    Raises:
        ConfigError: An unknown algorithm, batch sizes that do not divide, or a sample that does not fit.
    """
    _check_choices(config)
    check_sizes(config)
    _check_numbers(config)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    batch, mini, samples = config.data.train_batch_size, actor.ppo_mini_batch_size, rollout.n
    if batch % mini:
        raise ConfigError(
            f"data.train_batch_size is {batch}, actor.ppo_mini_batch_size {mini}: the first must be a multiple"
        )
    updates = config.trainer.v1.separate_async.parameter_sync_step
    if config.trainer.v1.trainer_mode == "separate_async" and batch != updates * mini:
        raise ConfigError(
            f"data.train_batch_size is {batch}; with trainer.v1.trainer_mode=separate_async verl wants "
            f"trainer.v1.separate_async.parameter_sync_step x actor.ppo_mini_batch_size = {updates} x {mini}"
        )
    if config.algorithm.filter_groups.enable and samples < 2:
        raise ConfigError(
            f"algorithm.filter_groups needs at least 2 samples a prompt, rollout.n is {samples}"
        )
    world = config.trainer.n_gpus_per_node * config.trainer.nnodes
    split = actor.ulysses_sequence_parallel_size
    if world % split:
        raise ConfigError(f"{world} GPUs do not divide by actor.ulysses_sequence_parallel_size={split}")
    ranks = world // split
    if mini * samples % ranks:
        raise ConfigError(f"mini batch of {mini} x {samples} samples does not divide by {ranks} data ranks")
    if actor.use_dynamic_bsz:
        _check_token_budget(config)
        return
    for key, size, count in _micro_batches(config, ranks):
        if size is None or count % size:
            raise ConfigError(
                f"{key} is {size}; expected a divisor of the {count} samples that a rank has there"
            )


def _check_numbers(config: Any) -> None:
    """Refuse what verl would find out about at the first update, or never."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    rates = {"actor_rollout_ref.actor.optim.lr": actor.optim.lr, "critic.optim.lr": config.critic.optim.lr}
    for key, rate in rates.items():
        if type(rate) not in (int, float) or not 0 <= rate < math.inf:
            raise ConfigError(f"verl.{key}: got {rate!r}, expected a number, 0 or above")
    if type(rollout.temperature) not in (int, float) or not 0 < rollout.temperature < math.inf:
        raise ConfigError(
            f"verl.actor_rollout_ref.rollout.temperature: got {rollout.temperature!r}, expected a number above 0"
        )
    steps, bound = config.trainer.total_training_steps, config.algorithm.filter_groups.max_num_gen_batches
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ConfigError(f"verl.trainer.total_training_steps: got {steps!r}, expected 1 or more, or null")
    if type(bound) is not int:
        text = "expected a whole number (0: no bound)"
        raise ConfigError(f"verl.algorithm.filter_groups.max_num_gen_batches: got {bound!r}, {text}")


def _micro_batches(config: Any, ranks: int) -> Iterator[tuple[str, int | None, int]]:
    """Key, value and number of samples of every micro batch that is used."""
    parts, samples = config.actor_rollout_ref, config.actor_rollout_ref.rollout.n
    per_step = config.data.train_batch_size * samples // ranks
    yield (
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        parts.actor.ppo_micro_batch_size_per_gpu,
        parts.actor.ppo_mini_batch_size * samples // ranks,
    )
    key = "log_prob_micro_batch_size_per_gpu"
    yield f"actor_rollout_ref.rollout.{key}", parts.rollout[key], per_step
    if parts.actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        yield f"actor_rollout_ref.ref.{key}", parts.ref[key], per_step
    if config.algorithm.adv_estimator == "gae":
        size = config.critic.ppo_micro_batch_size_per_gpu
        yield (
            "critic.ppo_micro_batch_size_per_gpu",
            size,
            config.critic.ppo_mini_batch_size * samples // ranks,
        )


def _check_token_budget(config: Any) -> None:
    actor = config.actor_rollout_ref.actor
    longest = config.data.max_prompt_length + config.data.max_response_length
    budget = actor.ppo_max_token_len_per_gpu * actor.ulysses_sequence_parallel_size
    if budget < longest:
        raise ConfigError(
            f"actor.ppo_max_token_len_per_gpu x ulysses_sequence_parallel_size is {budget} tokens; the "
            f"longest sample has {longest} (data.max_prompt_length + data.max_response_length)"
        )
