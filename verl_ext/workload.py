"""What a configuration of verl asks of the hardware, and whether batches, models and GPUs divide as verl needs it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from afm.errors import ConfigError
from afm.findings import Finding, Level
from afm.memory_arithmetic import Hardware, ModelShape

CRITIC_BUDGET = "ppo_infer_max_token_len_per_gpu"
"""What verl 0.9.1 packs the critic's batches by (``trainer/ppo/v1/trainer_base.py``); ``ppo_max_token_len_per_gpu``
is not read there. A key of its data class that its YAML does not declare."""
_CRITIC_BUDGET_DEFAULT = 32_768


@dataclass(frozen=True, slots=True)
class Placement:
    """How one model of the trainer lies on its GPUs.

    Attributes:
        tokens: Most tokens of one pass on one GPU.
        shards: GPUs that share its parameters.
        moves_parameters: They are on the GPU only while they are used.
        moves_optimizer: The same of the optimizer's state.
        stays_on_cpu: Everything is on the CPU all the time, but for the layer under work.
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
        own_gpus: Of all engines together, ``None`` when they share the trainer's.
        memory_share: Of a GPU, for weights and cache.
        model_len: Longest sequence, ``None`` for the model's own.
        sequences: Most at once in one engine.
        sleeps: It frees its memory while the trainer works.
    """

    name: str
    own_gpus: int | None
    tensor_parallel: int
    data_parallel: int
    memory_share: float
    model_len: int | None
    sequences: int
    sleeps: bool

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return self.tensor_parallel * self.data_parallel


@dataclass(frozen=True, slots=True)
class Workload:
    """One training. Lengths in tokens, batches in prompts.

    Attributes:
        log_prob_tokens: Most tokens of one pass that only computes probabilities, on one GPU.
        ahead: Episodes are rolled out while the trainer works (the asynchronous trainers).
        passes: Times that each sample is trained on (``ppo_epochs``).
        steps: ``None`` when the epochs decide.
        kept: Checkpoints that stay, ``None`` for all.
        saved: What a checkpoint of the actor holds.
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
        """Tokens of the longest sample."""
        return self.prompt + self.response

    @property
    def episodes(self) -> int:
        """Samples that a step trains on."""
        return self.batch * self.samples

    @property
    def engines(self) -> int:
        """Rollout engines on all GPUs."""
        return (self.engine.own_gpus or self.hardware.world) // self.engine.gpus

    @property
    def gpus(self) -> int:
        """GPUs of trainer and engines."""
        return self.hardware.world + (self.engine.own_gpus or 0)


def workload_of(config: Any, gpu_gib: float) -> Workload:
    """Read the composed configuration of verl (an OmegaConf).

    Raises:
        ConfigError: A size is no positive whole number, or the engines' share of memory no share.
    """
    check_sizes(config)
    parts, trainer, data = config.actor_rollout_ref, config.trainer, config.data
    actor, rollout = parts.actor, parts.rollout
    hardware = Hardware(trainer.nnodes, trainer.n_gpus_per_node, gpu_gib)
    split = actor.ulysses_sequence_parallel_size
    longest = data.max_prompt_length + data.max_response_length

    def tokens(budget: int, micro_batch: int | None) -> int:
        return int(budget) if actor.use_dynamic_bsz else (micro_batch or 1) * longest // split

    with_reference = actor.use_kl_loss or config.algorithm.use_kl_in_reward
    return Workload(
        hardware=hardware,
        engine=_engine(rollout, separate=trainer.v1.trainer_mode == "separate_async"),
        actor=_placement(
            actor.fsdp_config,
            tokens(actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu),
            hardware,
        ),
        reference=_placement(
            parts.ref.fsdp_config,
            tokens(parts.ref.log_prob_max_token_len_per_gpu, parts.ref.log_prob_micro_batch_size_per_gpu),
            hardware,
        )
        if with_reference
        else None,
        critic=_critic(config, hardware, longest) if _has_critic(config) else None,
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
        log_prob_tokens=tokens(
            rollout.log_prob_max_token_len_per_gpu, rollout.log_prob_micro_batch_size_per_gpu
        ),
        entropy_bonus=bool(actor.entropy_coeff),
        fused_logits=bool(parts.model.use_fused_kernels),
        checkpointing=bool(parts.model.enable_gradient_checkpointing),
        lora_rank=parts.model.lora_rank,
        steps=trainer.total_training_steps,
        save_every=trainer.save_freq,
        kept=trainer.max_actor_ckpt_to_keep,
        saved=tuple(actor.checkpoint.save_contents),
    )


def check_sizes(config: Any) -> None:
    """Refuse sizes that arithmetic cannot be done with.

    Raises:
        ConfigError: A size is no positive whole number, or the engines' share of memory no share.
    """
    for key in _SIZES:
        value = _value(config, key)
        if type(value) is not int or value < 1:
            raise ConfigError(f"verl.{key}: got {value!r}, expected a positive whole number")
    share = _value(config, _SHARE)
    if type(share) not in (int, float) or not 0 < share <= 1:
        raise ConfigError(
            f"verl.{_SHARE}: got {share!r}, expected a share of a GPU's memory above 0, at most 1"
        )


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part]
    return config


_SIZES = (
    *(f"data.{key}" for key in ("max_prompt_length", "max_response_length", "train_batch_size")),
    *(f"trainer.{key}" for key in ("nnodes", "n_gpus_per_node", "total_epochs")),
    *(f"actor_rollout_ref.actor.{key}" for key in ("ppo_mini_batch_size", "ppo_epochs")),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "critic.ulysses_sequence_parallel_size",
    *(f"actor_rollout_ref.rollout.{key}" for key in ("n", "max_num_seqs", "data_parallel_size")),
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
)
_SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"


def _engine(rollout: Any, *, separate: bool) -> RolloutEngine:
    return RolloutEngine(
        name=rollout.name,
        own_gpus=rollout.nnodes * rollout.n_gpus_per_node if separate else None,
        tensor_parallel=rollout.tensor_model_parallel_size,
        data_parallel=rollout.data_parallel_size,
        memory_share=rollout.gpu_memory_utilization,
        model_len=rollout.max_model_len,
        sequences=rollout.max_num_seqs,
        sleeps=bool(rollout.free_cache_engine),
    )


def _has_critic(config: Any) -> bool:
    enabled = config.critic.enable
    return bool(enabled) if enabled is not None else config.algorithm.adv_estimator == "gae"


def _critic(config: Any, hardware: Hardware, longest: int) -> Placement:
    critic = config.critic
    tokens = critic.get(CRITIC_BUDGET) or _CRITIC_BUDGET_DEFAULT
    if not critic.use_dynamic_bsz:
        tokens = (critic.ppo_micro_batch_size_per_gpu or 1) * longest // critic.ulysses_sequence_parallel_size
    return _placement(critic.fsdp, tokens, hardware)


def _placement(fsdp: Any, tokens: int, hardware: Hardware) -> Placement:
    return Placement(
        tokens=tokens,
        shards=fsdp.fsdp_size if fsdp.fsdp_size > 0 else hardware.world,
        moves_parameters=bool(fsdp.param_offload),
        moves_optimizer=bool(fsdp.optimizer_offload),
        stays_on_cpu=bool(fsdp.offload_policy or fsdp.forward_only),
    )


def split_findings(load: Workload, shape: ModelShape | None) -> Iterator[Finding]:
    """One finding for each thing that does not divide; one that says how it divides when all do."""
    faults = [*_gpu_faults(load), *_batch_faults(load), *(_model_faults(load, shape) if shape else ())]
    yield from (Finding(Level.ERROR, "splits", fault) for fault in faults)
    if _one_by_one(load) and load.gen_batch not in (None, 1):
        why = "with group filtering" if load.filtered else "in its asynchronous trainers"
        text = f"data.gen_batch_size is {load.gen_batch}; {why} verl fetches prompts one by one"
        yield Finding(Level.WARNING, "batch", f"{text}; leave it out")
    if not faults:
        ranks = load.hardware.world // load.sequence_parallel
        yield Finding(
            Level.OK,
            "splits",
            f"{load.gpus} GPUs: {load.engines} rollout engines of {load.engine.gpus}, {ranks} data ranks of "
            f"{load.sequence_parallel}",
        )
        yield Finding(
            Level.OK,
            "batch",
            f"{load.batch} prompts x {load.samples} samples = {load.episodes:,} a step, "
            f"{load.batch // load.mini_batch * load.passes} updates of {load.mini_batch * load.samples:,} samples "
            f"({load.mini_batch * load.samples // ranks:,} a data rank)",
        )


def _gpu_faults(load: Workload) -> Iterator[str]:
    world, each, node = load.hardware.world, load.engine.gpus, load.hardware.gpus
    served = load.engine.own_gpus or world
    sizes = "rollout.tensor_model_parallel_size x data_parallel_size"
    if world % load.sequence_parallel:
        yield f"{world} GPUs do not divide by actor.ulysses_sequence_parallel_size={load.sequence_parallel}"
    if served % each:
        yield f"{served} GPUs do not divide by {sizes} = {each}: the rest would have no rollout engine"
    elif node % each and each % node:
        yield f"an engine of {each} GPUs ({sizes}) fits no whole number of times into nodes of {node}"
    for name, place in (("actor", load.actor), ("critic", load.critic), ("ref", load.reference)):
        if place is not None and world % place.shards:
            yield f"{world} GPUs do not divide by {name}'s fsdp_size={place.shards}"


def _one_by_one(load: Workload) -> bool:
    return load.filtered or load.ahead


def _batch_faults(load: Workload) -> Iterator[str]:
    gen = load.gen_batch
    if gen and not _one_by_one(load) and load.batch % gen:
        yield f"data.train_batch_size={load.batch} is no multiple of data.gen_batch_size={gen}; leave the second out"


def _model_faults(load: Workload, shape: ModelShape) -> Iterator[str]:
    split, parts = load.engine.tensor_parallel, load.sequence_parallel
    key = f"rollout.tensor_model_parallel_size={split}"
    if shape.heads % split:
        fitting = [size for size in (1, 2, 4, 8) if not shape.heads % size]
        yield f"the model's {shape.heads} attention heads do not divide by {key}; expected one of {fitting}"
    elif shape.kv_heads % split and split % shape.kv_heads:
        yield f"the model's {shape.kv_heads} key-value heads and {key}: neither is a multiple of the other"
    if shape.mlp % split:
        yield f"the model's {shape.mlp} intermediate features do not divide by {key}"
    key = f"actor.ulysses_sequence_parallel_size={parts}"
    if shape.heads % parts:
        yield f"the model's {shape.heads} attention heads do not divide by {key}"
    elif shape.kv_heads % parts and parts % shape.kv_heads:
        yield f"the model's {shape.kv_heads} key-value heads and {key}: neither is a multiple of the other"
