"""The hyper-parameters of our reinforcement recipes beside those AFM published: ``python -m verl_ext.parity``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from afm.rewards.overlong import LARGEST_PENALTY
from verl_ext.compose import compose, overrides_of
from verl_ext.judging import reward_settings
from verl_ext.settings import load_settings

_UNSAID = "-"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyper-parameters of one training; ``None`` where a source is silent. Lengths in tokens."""

    advantage: str | None = None
    train_batch: int | None = None
    mini_batch: int | None = None
    samples: int | None = None
    prompt: int | None = None
    response: int | None = None
    turns: int | None = None
    clip: tuple[float, float, float] | None = None
    learning_rate: float | None = None
    warmup: float | None = None
    critic_learning_rate: float | None = None
    kl: float | None = None
    temperature: float | None = None
    steps: int | None = None
    epochs: int | None = None
    save_every: int | None = None
    test_every: int | None = None
    rollout_tensor_parallel: int | None = None
    rollout_memory: float | None = None
    nodes: int | None = None
    reward: str | None = None
    overlong: tuple[int, float] | None = None
    filter_metric: str | None = None
    filter_cap: int | None = None
    weight_decay: float | None = None
    kl_kind: str | None = None
    kl_in_reward: float | None = None


LABELS = {
    "advantage": "advantage",
    "reward": "reward",
    "overlong": "overlong buffer (tokens) / penalty at its end",
    "filter_metric": "groups are filtered by",
    "filter_cap": "training batches generated at most a step",
    "train_batch": "prompts a step",
    "mini_batch": "prompts an update",
    "samples": "samples a prompt",
    "prompt": "prompt (tokens)",
    "response": "response (tokens)",
    "turns": "tool turns",
    "clip": "clip low / high / c",
    "learning_rate": "learning rate",
    "warmup": "warm-up (steps, or share of them)",
    "critic_learning_rate": "critic's learning rate",
    "weight_decay": "weight decay",
    "kl": "KL in the loss",
    "kl_kind": "KL's estimator in the loss",
    "kl_in_reward": "KL in the reward",
    "temperature": "temperature",
    "steps": "steps",
    "epochs": "epochs",
    "save_every": "save every (steps)",
    "test_every": "test every (steps)",
    "rollout_tensor_parallel": "rollout tensor parallel",
    "rollout_memory": "rollout share of memory",
    "nodes": "nodes x 8 GPUs",
}

_WEB = Recipe(
    *("grpo", 64, 64, 8, 2048, 30720, 25, (0.2, 0.28, 10.0), 1e-6, 3, None, 0.0, 1.0),
    *(60, 2, 5, 1000, 8, 0.3, 8),
    *("correct + overlong", (3840, 1.0), "score", None, 0.1, "off", 0.0),
)
_CODE = Recipe(
    *("grpo", 256, 32, 8, 4096, 16384, 8, (0.2, 0.28, 3.0), 1e-6, 10, None, 0.0, 1.0),
    *(2000, 100, 5, 10, 4, 0.5, 8),
    *("correct * format + overlong", (2048, 1.0), "score", None, None, "off", 0.0),
)
_MHQA = Recipe(
    *("gae", 512, 256, 1, 2048, 8192, 8, (0.2, 0.28, 3.0), 1e-6, 0.285, 1e-5, 0.001, 1.0),
    *(1005, 15, 20, 20, 4, 0.5, 2),
    *("correct", None, "off", None, None, "low_var_kl", None),
)
SCRIPTS = {
    "web_dapo_32b": _WEB,
    "web_dapo_7b": Recipe(),
    "code_dapo_32b": _CODE,
    "code_dapo_32b_long": Recipe(),
    "code_dapo_7b": Recipe(),
    "mhqa_ppo_7b": _MHQA,
    "mhqa_ppo_3b": Recipe(),
}
"""The published training scripts (commit 8f94516); those that are silent have none of their size."""

PAPER = {
    "web_dapo_32b": Recipe(steps=24),
    "code_dapo_32b": Recipe(response=16384, steps=40),
    "code_dapo_32b_long": Recipe(response=32768, steps=120),
    "code_dapo_7b": Recipe(response=32768, steps=150),
}
"""The paper (arXiv 2508.13167)."""

PAPER_WINS = {("code_dapo_32b", "steps")}
"""Where sources differ and the recipe follows the paper: recipe and setting."""

_FILTERED_BY_ACC = (
    "filtering by `score` is filtering by shaping: it keeps groups of wrong answers that differ in length"
)
OURS_WINS = {
    (
        "web_dapo_32b",
        "reward",
    ): "an answer in broken form earns nothing; the scripts have variants that punish the form instead",
    ("web_dapo_32b", "filter_metric"): _FILTERED_BY_ACC,
    ("code_dapo_32b", "filter_metric"): _FILTERED_BY_ACC,
    ("mhqa_ppo_7b", "reward"): "an answer in broken form earns nothing",
}
"""Where the recipe follows neither: recipe and setting, with the reason."""


@cache
def our_recipe(config_file: Path) -> Recipe:
    """What a configuration trains with, as verl will read it.

    Raises:
        ConfigError: The configuration is wrong.
        MissingExtraError: verl is not installed.
    """
    settings = load_settings(config_file)
    config = compose(overrides_of(settings))
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    algorithm, with_critic = config.algorithm, config.algorithm.adv_estimator == "gae"
    filtering = algorithm.filter_groups
    reward = reward_settings(settings.rewards)
    long = reward.overlong
    steps = actor.optim.lr_warmup_steps
    return Recipe(
        advantage=config.algorithm.adv_estimator,
        train_batch=config.data.train_batch_size,
        mini_batch=actor.ppo_mini_batch_size,
        samples=rollout.n,
        prompt=config.data.max_prompt_length,
        response=config.data.max_response_length,
        turns=settings.spec().limits.max_turns,
        clip=(actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c),
        learning_rate=actor.optim.lr,
        warmup=steps if steps and steps > 0 else actor.optim.lr_warmup_steps_ratio,
        critic_learning_rate=config.critic.optim.lr if with_critic else None,
        kl=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        temperature=rollout.temperature,
        steps=config.trainer.total_training_steps,
        epochs=config.trainer.total_epochs,
        save_every=config.trainer.save_freq,
        test_every=config.trainer.test_freq,
        rollout_tensor_parallel=rollout.tensor_model_parallel_size,
        rollout_memory=rollout.gpu_memory_utilization,
        nodes=config.trainer.nnodes,
        reward=reward.formula,
        overlong=(long.buffer_tokens, LARGEST_PENALTY) if long else None,
        filter_metric=filtering.metric if filtering.enable else "off",
        filter_cap=filtering.max_num_gen_batches if filtering.enable else None,
        weight_decay=actor.optim.weight_decay,
        kl_kind=actor.kl_loss_type if actor.use_kl_loss else "off",
        kl_in_reward=algorithm.kl_ctrl.kl_coef if algorithm.use_kl_in_reward else 0.0,
    )


def said(recipe: Recipe) -> dict[str, Any]:
    """What a source says."""
    values = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    return {name: value for name, value in values.items() if value is not None}


def parity_page(configs: Path) -> str:
    """The whole page of the docs, in Markdown."""
    lines = [
        "# Our reinforcement recipes beside AFM's",
        "",
        "Generated from `configs/rl/*.yaml`: `python -m verl_ext.parity > docs/rl_parity.md`.",
        f"`{_UNSAID}`: the source does not say. **Bold**: the sources differ. With group filtering verl fetches prompts one by one, so the",
        "scripts' `gen_batch_size` has no counterpart. In rewards `correct` is 0 or 1 by the row's scorer (a model judge, program tests or",
        "Math-Verify, exact match), `format` 0 or 1, and `overlong` falls from 0 to minus the penalty within the last tokens of a",
        "response, its buffer. The length is that of the whole response, observations included. `acc` is `correct * format`, `score` the",
        "whole reward with its shaping. Groups whose samples have no spread in what they are filtered by are generated again; the scripts",
        "do so until the batch is full, ours end with a reason (`short_batch`, [rl.md](rl.md)).",
        "",
        "| recipe | setting | ours | published script | paper |",
        "|---|---|---|---|---|",
        *(row for name in SCRIPTS for row in _rows(name, our_recipe(configs / f"{name}.yaml"))),
        "",
        "Where ours follow neither source:",
        "",
        *(f"- `{name}`, {LABELS[field]}: {reason}." for (name, field), reason in OURS_WINS.items()),
        "",
        "All of them: FSDP2 with parameters and optimizer offloaded, asynchronous rollouts, loss averaged over tokens.",
    ]
    return "\n".join(lines) + "\n"


def _rows(name: str, ours: Recipe) -> Iterator[str]:
    columns = [said(ours), said(SCRIPTS[name]), said(PAPER.get(name, Recipe()))]
    for field, label in LABELS.items():
        values = [column.get(field) for column in columns]
        if values == [None, None, None]:
            continue
        cells = [_cell(value) for value in values]
        if len({cell for cell in cells if cell != _UNSAID}) > 1:
            cells = [f"**{cell}**" if cell != _UNSAID else cell for cell in cells]
        yield f"| `{name}` | {label} | {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if value is None:
        return _UNSAID
    if isinstance(value, tuple):
        return " / ".join(map(_cell, value))
    if isinstance(value, str) and " " in value:
        return f"`{value}`"
    return f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.stdout.write(parity_page(Path("configs/rl")))
