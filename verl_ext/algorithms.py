"""The keys of verl 0.9.1 that choose the algorithm of a run, with the words and numbers that verl accepts.

The recipes in ``configs/rl`` train with DAPO or PPO. GSPO, CISPO, Dr. GRPO, RLOO, KL, entropy and TIS are files to
merge into a recipe (``configs/rl/algorithms``), each with its formula and source. verl computes the formulas
(``verl/trainer/ppo/core_algos.py``). This module rejects a misspelt word before anything starts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from afm.configuration import parse_yaml
from afm.errors import suggestion
from afm.findings import Finding, Level
from afm.harness.credit import Credit, MemberCredit
from verl_ext.teacher import REVERSE_KL

CPU_ENGINE = "afm_cpu"
"""Name of our rollout engine: ``actor_rollout_ref.rollout.name=afm_cpu``."""
CRITIC_BUDGET = "ppo_infer_max_token_len_per_gpu"
"""Tokens per GPU by which verl 0.9.1 packs the critic's batches (``trainer/ppo/v1/trainer_base.py``). It reads neither
``use_dynamic_bsz`` nor ``ppo_max_token_len_per_gpu`` there. verl's data class has this key, but its YAML omits it."""
SPLIT = "ulysses_sequence_parallel_size"
ESTIMATOR = "algorithm.adv_estimator"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
GROUP_METRIC = "algorithm.filter_groups.metric"

FACTS = (
    "reward", "score", "acc", "correct", "format", "overlong", "abstained", "answered", "cut_short",
    "used_tool", "tool_calls", "tool_failures", "duplicate_calls", "agent_tokens", "response_tokens",
    "seconds", "token_drift",
)  # fmt: skip
"""The facts that our agent loop reports for each sample (:func:`verl_ext.training_sample.facts`). Groups can be filtered
by any of them."""

SHAPED = ("reward", "score", "overlong")
"""The facts that include the overlong penalty. They differ between answers that are equally wrong."""

CREDIT = "harness_credit"
"""Key under ``trainer``: how an episode of a harness shares its credit over its trajectories."""
BY_MEMBER = "harness_by_member"
"""Key under ``trainer``: which advantage a member of a team gets."""
_BY_EPISODE = ("grpo", "gae", REVERSE_KL)
"""Estimators that get one sequence of each episode from verl, or that do not compare episodes."""
_KL = tuple(name + end for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for end in ("", "+"))
_ESTIMATORS = (
    "gae", "gdpo", "gpg", "grpo", "grpo_passk", "grpo_vectorized", "opo", "optimal_token_baseline",
    "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", REVERSE_KL, "rloo", "rloo_vectorized",
    "tir_optimal_token_baseline",
)  # fmt: skip
_LOSSES = (
    "bypass_mode", "cispo", "clip_cov", "dppo_kl", "dppo_tv", "dro", "geo_mean", "gpg", "gspo", "kl_cov",
    "sapo", "vanilla",
)  # fmt: skip
CHOICES: Mapping[str, tuple[str | None, ...]] = {
    ESTIMATOR: _ESTIMATORS,
    LOSS: _LOSSES,
    "actor_rollout_ref.actor.loss_agg_mode": (
        "token-mean",
        "token-sum",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
    ),
    "actor_rollout_ref.actor.kl_loss_type": _KL,
    "algorithm.kl_penalty": _KL,
    GROUP_METRIC: FACTS,
    "algorithm.rollout_correction.rollout_is": ("token", "sequence", None),
    "trainer.v1.sampler.max_off_policy_strategy": ("drop", "wait"),
    "trainer.v1.trainer_mode": ("sync", "colocate_async", "separate_async"),
    "actor_rollout_ref.rollout.name": ("sglang", "vllm", CPU_ENGINE),
}
"""The accepted words of each key. Engines are those whose stop parameters :mod:`verl_ext.training_sample` knows."""


Rules = Iterable[tuple[tuple[str, ...], Callable[[Any], bool], str]]
"""Keys, a test of their values, and the expectation in words."""


def _real(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


_ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
_SIZES = (
    *(f"data.{key}" for key in ("max_prompt_length", "max_response_length", "train_batch_size")),
    *(f"trainer.{key}" for key in ("nnodes", "n_gpus_per_node", "total_epochs")),
    *(f"{_ACTOR}.{key}" for key in ("ppo_mini_batch_size", "ppo_epochs", "ppo_max_token_len_per_gpu")),
    *(f"{part}.{SPLIT}" for part in (_ACTOR, f"{_ACTOR}.fsdp_config", "critic.fsdp")),
    *(f"{_ROLLOUT}.{key}" for key in ("n", "max_num_seqs", "data_parallel_size")),
    f"{_ROLLOUT}.tensor_model_parallel_size",
    "critic.ppo_mini_batch_size",
)
_OPTIONAL_SIZES = (
    *(f"{part}.ppo_micro_batch_size_per_gpu" for part in (_ACTOR, "critic")),
    *(f"{part}.log_prob_micro_batch_size_per_gpu" for part in (_ROLLOUT, _REF)),
    *(f"{part}.log_prob_max_token_len_per_gpu" for part in (_ROLLOUT, _REF)),
    f"critic.{CRITIC_BUDGET}",
    "trainer.total_training_steps",
)
_SHARE = (f"{_ROLLOUT}.gpu_memory_utilization",)
_BOUND = ("algorithm.filter_groups.max_num_gen_batches",)
_RATES = (f"{_ACTOR}.optim.lr", "critic.optim.lr")
_SHARDS = (f"{_ACTOR}.fsdp_config.fsdp_size", f"{_REF}.fsdp_config.fsdp_size", "critic.fsdp.fsdp_size")


def _positive(value: Any) -> bool:
    return type(value) is int and value > 0


SIZE_RULES: Rules = (
    (_SIZES, _positive, "a positive whole number"),
    (_OPTIONAL_SIZES, lambda value: value is None or _positive(value), "a positive whole number, or null"),
    (_SHARDS, lambda value: value == -1 or _positive(value), "a positive whole number, or -1 for all GPUs"),
    (
        ("trainer.critic_warmup",),
        lambda value: type(value) is int and value >= 0,
        "a whole number, 0 or above",
    ),
    (
        _SHARE,
        lambda value: _real(value) and 0 < value <= 1,
        "a share of a GPU's memory, above 0 and at most 1",
    ),
)
OTHER_RULES: Rules = (
    (_RATES, lambda value: _real(value) and value >= 0, "a number, 0 or above"),
    ((f"{_ROLLOUT}.temperature",), lambda value: _real(value) and value > 0, "a number above 0"),
    (_BOUND, lambda value: type(value) is int, "a whole number (0 for no limit)"),
)


def _recipe(name: str) -> str:
    """Return what to write for an algorithm that a shipped YAML sets up, empty for any other name."""
    word = name.lower().replace("-", "_")
    for folder in ("base", "algorithms"):
        file = Path("configs/rl", folder, f"{word}.yaml")
        if (shipped := Path(__file__).parents[1] / file).is_file():
            verl = parse_yaml(shipped.read_text(encoding="utf-8"))["verl"]
            own = verl.get("algorithm", {}).get("adv_estimator", "grpo")
            recipes = sorted(path.name for path in shipped.parents[1].glob(f"*_{word}_*.yaml"))
            example = f", or run a recipe: afm rl configs/rl/{min(recipes, key=len)}" if recipes else ""
            return (
                f"{name} is a recipe, whose estimator is {own}; write `extends: {file}` in your YAML{example}"
            )
    return ""


def choice_findings(config: Any) -> Iterator[Finding]:
    """Report words that verl does not know, each with the closest known one. Modules of the user may register more words."""
    from omegaconf import OmegaConf

    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(",")
    extended = any(name.strip() not in ("", "verl_ext") for name in modules)
    for key, known in CHOICES.items():
        value = OmegaConf.select(config, key)
        unused = key == GROUP_METRIC and not config.algorithm.filter_groups.enable
        if value in known or unused or (extended and key in (ESTIMATOR, LOSS)):
            continue
        words = [word or "null" for word in known]
        advice = _recipe(str(value)) if key == ESTIMATOR else ""
        text = f"verl.{key}: got {value!r}; {advice or suggestion(str(value), words)}"
        yield Finding(Level.ERROR, "algorithm", text)
    yield from lora_findings(config)
    rollout = config.actor_rollout_ref.rollout
    if OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode") and (
        rollout.name == "sglang" or not (rollout.get("custom") or {}).get("weight_proof", True)
    ):
        why = "with SGLang" if rollout.name == "sglang" else "with weight_proof: false"
        text = f"verl.algorithm.rollout_correction.bypass_mode: {why}, nothing then compares the engine's weights with the trainer's"
        yield Finding(
            Level.ERROR,
            "algorithm",
            f"{text}; remove it, so that the alarm `mismatch` can compare probabilities",
        )
    credit = OmegaConf.select(config, f"trainer.{CREDIT}")
    if credit is not None and config.algorithm.adv_estimator not in _BY_EPISODE:
        text = f"verl.{ESTIMATOR}: {config.algorithm.adv_estimator} treats each trajectory of an episode as an episode"
        yield Finding(Level.ERROR, "algorithm", f"{text}; with a harness use {' or '.join(_BY_EPISODE)}")
    if credit == Credit.BY_TURN and config.algorithm.adv_estimator in ("gae", REVERSE_KL):
        text = f"harness.credit: by_turn divides the single advantage of an episode; {config.algorithm.adv_estimator} has one per token"
        yield Finding(Level.ERROR, "algorithm", f"{text}; use all or last")
    by_member = OmegaConf.select(config, f"trainer.{BY_MEMBER}") or MemberCredit.SHARED
    if by_member != MemberCredit.SHARED and config.algorithm.adv_estimator != "grpo":
        text = f"harness.by_member: {by_member} compares the episodes of a question, but {config.algorithm.adv_estimator} does not"
        yield Finding(Level.ERROR, "algorithm", f"{text}; use shared, or verl.{ESTIMATOR}=grpo")
    if by_member != MemberCredit.SHARED and config.actor_rollout_ref.rollout.n < 2:
        text = f"harness.by_member: {by_member} compares the episodes of a question, but each question has only one"
        yield Finding(Level.ERROR, "algorithm", f"{text}; set verl.actor_rollout_ref.rollout.n to 2 or more")


def lora_findings(config: Any) -> Iterator[Finding]:
    """Report settings with which verl loses LoRA adapters."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    if not model.lora_rank and not model.lora_adapter_path:
        return
    if "hf_model" in actor.checkpoint.save_contents:
        text = "actor.checkpoint.save_contents has hf_model: verl would save it with the parameter names of the adapter"
        yield Finding(Level.ERROR, "lora", f"{text}; remove it (afm export merges the adapter)")
    if config.trainer.v1.trainer_mode == "separate_async" and not model.lora.merge:
        text = "trainer.v1.trainer_mode=separate_async never sends an adapter (verl issue 7495)"
        yield Finding(Level.ERROR, "lora", f"{text}; set verl.actor_rollout_ref.model.lora.merge=true")


def number_findings(config: Any, rules: Rules) -> Iterator[Finding]:
    """Report each key of ``rules`` whose value verl does not accept."""
    from omegaconf import OmegaConf

    for keys, accepts, expected in rules:
        for key in keys:
            if not accepts(value := OmegaConf.select(config, key)):
                yield Finding(Level.ERROR, "batch", f"verl.{key}: got {value!r}, expected {expected}")
