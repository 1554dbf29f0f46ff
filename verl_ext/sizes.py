"""Sizes of a run: what verl's configuration needs from the hardware, and whether batches, models and GPUs divide.

verl reports these faults only after the trainer has started, or never.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from afm.findings import Finding, Level, refuse_errors
from afm.harness.credit import Credit
from afm.memory_arithmetic import Hardware, ModelShape
from afm.terminal import plural
from verl_ext.algorithms import (
    CREDIT,
    CRITIC_BUDGET,
    OTHER_RULES,
    SIZE_RULES,
    SPLIT,
    choice_findings,
    number_findings,
)
from verl_ext.engines import parameter_findings

_CRITIC_BUDGET_DEFAULT = 32_768
_CRITIC_ADVICE = (
    "; gae trains a critic: set this key and verl.critic.optim.lr as configs/tiny/rl/mhqa_ppo.yaml does, or begin with "
    "configs/rl/base/ppo.yaml (for GPUs)"
)


@dataclass(frozen=True, slots=True)
class Placement:
    """How one model of the trainer is placed on its GPUs.

    Attributes:
        tokens: Most tokens of one pass on one GPU.
        shards: GPUs that share its parameters.
        moves_parameters: The parameters are on the GPU only while they are used.
        moves_optimizer: So is the state of the optimizer.
        stays_on_cpu: Everything stays on the CPU except the layer that is being computed.
    """

    tokens: int
    shards: int
    moves_parameters: bool
    moves_optimizer: bool
    stays_on_cpu: bool


@dataclass(frozen=True, slots=True)
class RolloutEngine:
    """The rollout engines.

    Attributes:
        own_gpus: GPUs of all engines together, ``None`` if the engines share those of the trainer.
        node_gpus: GPUs of one node of the engines.
        memory_share: Share of a GPU's memory for weights and cache, 0 to 1.
        model_len: Tokens of the longest sequence, ``None`` for the limit of the model.
        sleeps: The engine frees its memory while the trainer works.
    """

    name: str
    own_gpus: int | None
    node_gpus: int
    tensor_parallel: int
    data_parallel: int
    memory_share: float
    model_len: int | None
    sleeps: bool

    @property
    def gpus(self) -> int:
        """Number of GPUs of one engine."""
        return self.tensor_parallel * self.data_parallel


@dataclass(frozen=True, slots=True)
class RunSizes:
    """The sizes of one run: lengths in tokens, batches in prompts.

    Attributes:
        log_prob_tokens: Most tokens of one pass on one GPU that only computes log-probabilities.
        ahead: Episodes are rolled out while the trainer works (the asynchronous trainers).
        passes: Number of times that each sample is trained on (``ppo_epochs``).
        packed: Micro batches are filled up to a number of tokens (``use_dynamic_bsz``).
        steps: Training steps, ``None`` if the epochs decide.
        kept: Number of checkpoints to keep, ``None`` for all.
        saved: Contents of a checkpoint of the actor.
    """

    hardware: Hardware
    engine: RolloutEngine
    actor: Placement
    reference: Placement | None
    critic: Placement | None
    prompt: int
    response: int
    batch: int
    mini_batch: int
    gen_batch: int | None
    samples: int
    passes: int
    filtered: bool
    ahead: bool
    packed: bool
    sequence_parallel: int
    critic_parallel: int
    log_prob_tokens: int
    entropy_bonus: bool
    fused_logits: bool
    checkpointing: bool
    lora_rank: int
    steps: int | None
    save_every: int
    kept: int | None
    saved: tuple[str, ...]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sample."""
        return self.prompt + self.response

    @property
    def episodes(self) -> int:
        """Number of samples that a step trains on."""
        return self.batch * self.samples

    @property
    def engines(self) -> int:
        """Number of rollout engines on all GPUs."""
        return (self.engine.own_gpus or self.hardware.world) // self.engine.gpus

    @property
    def ranks(self) -> int:
        """Number of data ranks: groups of GPUs, each of which works on different samples."""
        return self.hardware.world // self.sequence_parallel


def has_critic(config: Any) -> bool:
    """Return whether verl trains a critic (verl/trainer/ppo/utils.py:96)."""
    enabled = config.critic.enable
    return bool(enabled) if enabled is not None else config.algorithm.adv_estimator == "gae"


def sizes_of(config: Any, gpu_gib: float = 80.0) -> RunSizes:
    """Read the sizes from verl's composed configuration (an OmegaConf).

    Args:
        gpu_gib: Memory of one GPU in GiB.

    Raises:
        ConfigError: A size is not a positive whole number, or the engines' share of memory is not in (0, 1].
    """
    refuse_errors(number_findings(config, SIZE_RULES))
    parts, trainer, data = config.actor_rollout_ref, config.trainer, config.data
    actor, rollout = parts.actor, parts.rollout
    hardware = Hardware(trainer.nnodes, trainer.n_gpus_per_node, gpu_gib)
    longest = data.max_prompt_length + data.max_response_length
    # Of two keys the older one wins, unless it is 1 (verl/workers/config/actor.py:328).
    split = actor[SPLIT] if actor[SPLIT] > 1 else actor.fsdp_config[SPLIT]
    packed = config.critic.get(CRITIC_BUDGET) or _CRITIC_BUDGET_DEFAULT

    def tokens(budget: int | None, micro_batch: int | None) -> int:
        return (budget or 0) if actor.use_dynamic_bsz else (micro_batch or 1) * longest // split

    def read(section: Any) -> int:
        return tokens(section.log_prob_max_token_len_per_gpu, section.log_prob_micro_batch_size_per_gpu)

    trained = tokens(actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu)
    ref = parts.ref if actor.use_kl_loss or config.algorithm.use_kl_in_reward else None
    return RunSizes(
        hardware=hardware,
        engine=_engine(rollout, hardware, separate=trainer.v1.trainer_mode == "separate_async"),
        actor=_placement(actor.fsdp_config, trained, hardware),
        reference=_placement(ref.fsdp_config, read(ref), hardware) if ref else None,
        critic=_placement(config.critic.fsdp, packed, hardware) if has_critic(config) else None,
        prompt=data.max_prompt_length,
        response=data.max_response_length,
        batch=data.train_batch_size,
        mini_batch=actor.ppo_mini_batch_size,
        gen_batch=data.gen_batch_size,
        samples=rollout.n,
        passes=actor.ppo_epochs,
        filtered=bool(config.algorithm.filter_groups.enable),
        ahead=trainer.v1.trainer_mode != "sync",
        packed=bool(actor.use_dynamic_bsz),
        sequence_parallel=split,
        critic_parallel=config.critic.fsdp[SPLIT],
        log_prob_tokens=read(rollout),
        entropy_bonus=bool(actor.entropy_coeff),
        fused_logits=bool(parts.model.use_fused_kernels),
        checkpointing=bool(parts.model.enable_gradient_checkpointing),
        lora_rank=parts.model.lora_rank,
        steps=trainer.total_training_steps,
        save_every=trainer.save_freq,
        kept=trainer.max_actor_ckpt_to_keep,
        saved=tuple(actor.checkpoint.save_contents),
    )


def _placement(fsdp: Any, tokens: int, hardware: Hardware) -> Placement:
    return Placement(
        tokens=tokens,
        # verl takes all GPUs for a size that is larger than their number (workers/engine/fsdp/utils.py:47).
        shards=fsdp.fsdp_size if 0 < fsdp.fsdp_size < hardware.world else hardware.world,
        moves_parameters=bool(fsdp.param_offload),
        moves_optimizer=bool(fsdp.optimizer_offload),
        stays_on_cpu=bool(fsdp.offload_policy or fsdp.forward_only),
    )


def _engine(rollout: Any, hardware: Hardware, *, separate: bool) -> RolloutEngine:
    return RolloutEngine(
        name=rollout.name,
        own_gpus=rollout.nnodes * rollout.n_gpus_per_node if separate else None,
        node_gpus=rollout.n_gpus_per_node if separate else hardware.gpus,
        tensor_parallel=rollout.tensor_model_parallel_size,
        data_parallel=rollout.data_parallel_size,
        memory_share=rollout.gpu_memory_utilization,
        model_len=rollout.max_model_len,
        sleeps=bool(rollout.free_cache_engine),
    )


def check(config: Any, shape: ModelShape | None = None, first: Iterable[Finding] = ()) -> None:
    """Reject words and sizes that verl rejects late or never.

    Args:
        first: Findings that the error tells before those of the sizes.

    Raises:
        ConfigError: An unknown algorithm, sizes that do not divide, or a sample that does not fit.
    """
    refuse_errors(choice_findings(config))
    refuse_errors(parameter_findings(config))
    refuse_errors((*first, *size_findings(config, sizes_of(config), shape)))


def size_findings(config: Any, sizes: RunSizes, shape: ModelShape | None = None) -> Iterator[Finding]:
    """Report numbers, GPUs, batches and token budgets that do not divide or fit, or how they divide if all do."""
    yield from number_findings(config, OTHER_RULES)
    packed, asked = sizes.packed, bool(config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz)
    if packed != asked:  # verl asserts it in a worker
        text = f"rollout.log_prob_use_dynamic_bsz is {asked}, but actor.use_dynamic_bsz is {packed}: verl requires equal values"
        yield Finding(Level.ERROR, "batch", f"{text}; remove the first")
    yield from split_findings(sizes, shape, config.trainer.device)
    if not sizes.hardware.world % sizes.sequence_parallel:
        yield from (Finding(Level.ERROR, "batch", fault) for fault in _batch_faults(config, sizes))
    yield from (Finding(Level.ERROR, "context", fault) for fault in budget_faults(sizes))


def _batch_faults(config: Any, sizes: RunSizes) -> Iterator[str]:
    """Report batches that do not divide into mini batches, data ranks and micro batches. The GPUs form whole data ranks."""
    batch, mini, ranks = sizes.batch, sizes.mini_batch, sizes.ranks
    if batch % mini:
        yield f"data.train_batch_size is {batch}; expected a multiple of actor.ppo_mini_batch_size ({mini})"
    updates = config.trainer.v1.separate_async.parameter_sync_step
    if config.trainer.v1.trainer_mode == "separate_async" and batch != updates * mini:
        yield (
            f"data.train_batch_size is {batch}; with trainer.v1.trainer_mode=separate_async, expected "
            f"trainer.v1.separate_async.parameter_sync_step x actor.ppo_mini_batch_size = {updates} x {mini}"
        )
    if sizes.filtered and sizes.samples < 2:
        yield f"algorithm.filter_groups needs at least 2 samples per prompt, but rollout.n is {sizes.samples}"
    if mini * sizes.samples % ranks:
        step = ranks // math.gcd(ranks, sizes.samples)
        text = f"mini batch of {mini} x {sizes.samples} samples is not divisible by {ranks} data ranks"
        yield f"{text}; expected actor.ppo_mini_batch_size {step}, {2 * step} or another multiple of {step}"
    elif not sizes.packed:
        for key, size, (count, origin) in _micro_batches(config, sizes):
            if size is None or count % size:
                text = f"verl.{key} is {size}; expected one of {_divisors(count)} (divisors of {count}): {origin}"
                yield text + (_CRITIC_ADVICE if size is None and key.startswith("critic.") else "")


def _micro_batches(config: Any, sizes: RunSizes) -> Iterator[tuple[str, int | None, tuple[int, str]]]:
    """Return key and value of each micro batch in use, and the number that it must divide, with its origin in words."""
    samples, ranks, parts, critic = sizes.samples, sizes.ranks, config.actor_rollout_ref, config.critic
    size, log_prob = "ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu"

    def share(key: str, prompts: int) -> tuple[int, str]:
        text = f"a data rank has {key} x rollout.n / data ranks = {prompts} x {samples} / {ranks} samples"
        return prompts * samples // ranks, text

    several = config.trainer.get(CREDIT) not in (None, Credit.LAST)
    per_step = _least_step(config, sizes) if several else share("data.train_batch_size", sizes.batch)
    yield (
        f"actor_rollout_ref.actor.{size}",
        parts.actor[size],
        share("actor.ppo_mini_batch_size", sizes.mini_batch),
    )
    yield f"actor_rollout_ref.rollout.{log_prob}", parts.rollout[log_prob], per_step
    if sizes.reference:
        yield f"actor_rollout_ref.ref.{log_prob}", parts.ref[log_prob], per_step
    if config.algorithm.adv_estimator == "gae":
        yield f"critic.{size}", critic[size], share("critic.ppo_mini_batch_size", critic.ppo_mini_batch_size)


def _least_step(config: Any, sizes: RunSizes) -> tuple[int, str]:
    """Return the number of samples of which a data rank gets a multiple in each step of a harness, with its origin in words.

    Episodes of a harness train any number of sequences. verl 0.9.1 adds empty ones up to a multiple of data ranks and mini
    batches (``_get_required_batch_multiple``, trainer/ppo/v1/trainer_base.py:1589). Then it asserts that micro batches
    divide the sum (``prepare_micro_batches``, workers/engine/utils.py:123).
    """
    multiples = {"data ranks": sizes.ranks}
    if config.trainer.critic_warmup <= 1:  # else the first steps train the critic only
        multiples["actor.ppo_mini_batch_size x rollout.n"] = sizes.mini_batch * sizes.samples
    if has_critic(config):
        multiples["critic.ppo_mini_batch_size x rollout.n"] = (
            config.critic.ppo_mini_batch_size * sizes.samples
        )
    text = " and ".join(f"{value} ({key})" for key, value in multiples.items())
    why = "an episode of a harness may train several sequences, and verl fills each step up to a multiple of"
    return math.lcm(*multiples.values()) // sizes.ranks, f"{why} {text}, shared by {sizes.ranks} data ranks"


def budget_faults(sizes: RunSizes) -> Iterator[str]:
    """Report token budgets below the longest sample. verl fails at the first sample that is longer than its budget."""
    budgets = {}
    if sizes.packed:
        budgets["actor.ppo_max_token_len_per_gpu"] = sizes.actor.tokens, sizes.sequence_parallel
        budgets["rollout.log_prob_max_token_len_per_gpu"] = sizes.log_prob_tokens, sizes.sequence_parallel
        if sizes.reference:
            budgets["ref.log_prob_max_token_len_per_gpu"] = sizes.reference.tokens, sizes.sequence_parallel
    if sizes.critic:
        budgets[f"critic.{CRITIC_BUDGET}"] = sizes.critic.tokens, sizes.critic_parallel
    for key, (tokens, parts) in budgets.items():
        if tokens * parts < sizes.longest:
            text = f"{key}: {tokens:,} tokens x {parts} GPUs, fewer than the longest sample has ({sizes.longest:,})"
            yield f"{text}; raise it to {-(-sizes.longest // parts)}"


def split_findings(sizes: RunSizes, shape: ModelShape | None, device: str = "cuda") -> Iterator[Finding]:
    """Report each size that does not divide, or how the sizes divide if all do."""
    faults = [*_gpu_faults(sizes), *(_model_faults(sizes, shape) if shape else ())]
    gen, one_by_one = sizes.gen_batch, sizes.filtered or sizes.ahead
    if gen and not one_by_one and sizes.batch % gen:
        text = f"data.train_batch_size={sizes.batch} is not a multiple of data.gen_batch_size={gen}"
        faults.append(f"{text}; remove the second")
    yield from (Finding(Level.ERROR, "splits", fault) for fault in faults)
    if one_by_one and gen not in (None, 1):
        why = "with group filtering" if sizes.filtered else "in its asynchronous trainers"
        text = f"data.gen_batch_size is {gen}; {why} verl fetches prompts one by one"
        yield Finding(Level.WARNING, "batch", f"{text}; remove it")
    if not faults:
        gpus, mini = sizes.hardware.world + (sizes.engine.own_gpus or 0), sizes.mini_batch * sizes.samples
        place = plural(gpus, "process", "processes") if device == "cpu" else plural(gpus, "GPU")
        text = f"{place}: {plural(sizes.engines, 'rollout engine')} of {sizes.engine.gpus}"
        text += f", {plural(sizes.ranks, 'data rank')} of {sizes.sequence_parallel}"
        yield Finding(Level.OK, "splits", text)
        text = f"{plural(sizes.batch, 'prompt')} x {plural(sizes.samples, 'sample')} = {sizes.episodes:,} per step, "
        updates = sizes.batch // sizes.mini_batch * sizes.passes
        text += f"{plural(updates, 'update')} of {plural(mini, 'sample')} "
        yield Finding(Level.OK, "batch", f"{text}({mini // sizes.ranks:,} per data rank)")


def _gpu_faults(sizes: RunSizes) -> Iterator[str]:
    world, each, node = sizes.hardware.world, sizes.engine.gpus, sizes.engine.node_gpus
    served = sizes.engine.own_gpus or world
    factors = "rollout.tensor_model_parallel_size x data_parallel_size"
    if world % sizes.sequence_parallel:
        text = f"{world} GPUs are not divisible by actor.ulysses_sequence_parallel_size={sizes.sequence_parallel}"
        yield f"{text}; expected one of {_divisors(world)}"
    if served % each:
        text = f"{served} GPUs are not divisible by {factors} = {each}: the rest would have no rollout engine"
        yield f"{text}; expected one of {_divisors(served)}"
    elif node % each and each % node:
        text = f"an engine of {each} GPUs ({factors}) does not fit evenly into nodes of {node} GPUs"
        yield f"{text}; expected an engine of {_divisors(node)} GPUs, or nodes of {each} or {2 * each} GPUs"
    for name, place in (("actor", sizes.actor), ("critic", sizes.critic), ("ref", sizes.reference)):
        if place is not None and world % place.shards:
            text = f"{world} GPUs are not divisible by {name}'s fsdp_size={place.shards}"
            yield f"{text}; expected -1 for all GPUs, or one of {_divisors(world)}"


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if not number % size)


def _model_faults(sizes: RunSizes, shape: ModelShape) -> Iterator[str]:
    for key, split in (
        ("rollout.tensor_model_parallel_size", sizes.engine.tensor_parallel),
        ("actor.ulysses_sequence_parallel_size", sizes.sequence_parallel),
    ):
        if shape.heads % split:
            fitting = [size for size in (1, 2, 4, 8) if not shape.heads % size]
            text = f"the model's {shape.heads} attention heads are not divisible by {key}={split}"
            yield f"{text}; expected one of {fitting}"
        elif shape.kv_heads % split and split % shape.kv_heads:
            text = f"the model's {shape.kv_heads} key-value heads and {key}={split}"
            yield f"{text}: neither is a multiple of the other; expected one of {_divisors(shape.kv_heads)}"
    if shape.mlp % sizes.engine.tensor_parallel:
        key = f"rollout.tensor_model_parallel_size={sizes.engine.tensor_parallel}"
        fitting = [size for size in (1, 2, 4, 8) if not shape.mlp % size and not shape.heads % size]
        yield f"the model's {shape.mlp} intermediate features are not divisible by {key}; expected one of {fitting}"
