"""Arithmetic about memory and disk: each GPU in each phase of a step, the rollout engines' cache, the checkpoints.

These figures were never compared with a GPU. They show what cannot fit; they promise nothing about what does. Trainer
and rollout engines share the GPUs: verl moves what it can away between the phases. FSDP2 keeps parameters, gradients
and AdamW in fp32 and computes in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from afm.findings import Finding, Level
from afm.memory_arithmetic import (
    GIB,
    MemoryNeed,
    ModelShape,
    activation_bytes,
    cpu_finding,
    described,
    disk_finding,
    fits,
    layer_bytes,
)
from verl_ext.sizes import Placement, RunSizes

_BF16 = 2
_TRAINED_LOGIT, _ENTROPY_LOGIT, _READ_LOGIT = 4, 4, 6
"""Bytes of a logit: bf16 and its gradient, the share of an entropy bonus, and the bf16, softmax and product of a pass
without gradients, which computes the entropy for the metrics."""
_BUCKET = 2 * GIB
"""Weights on their way to the engine (``checkpoint_engine.update_weights_bucket_megabytes``)."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """What the rollout engines can hold at once.

    Attributes:
        weight_bytes: Of the model, on each GPU.
        token_bytes: Of one token, on each GPU of an engine.
        tokens: In one engine, negative when not even the weights fit.
        sequences: Of full length, in one engine.
    """

    weight_bytes: int
    token_bytes: int
    tokens: int
    sequences: int


def kv_cache(sizes: RunSizes, shape: ModelShape) -> KvCache:
    """The cache of one engine: its share of memory less the weights, by keys and values of every layer in bf16.

    An engine that splits a model over more GPUs than it has key-value heads keeps copies of them.
    """
    split = sizes.engine.tensor_parallel
    weights = _BF16 * shape.parameters // split
    token = 2 * _BF16 * shape.layers * max(1, shape.kv_heads // split) * shape.head_dim
    tokens = (round(sizes.engine.memory_share * sizes.hardware.gpu_gib * GIB) - weights) // token
    return KvCache(weights, token, tokens, max(0, tokens // sizes.longest))


@dataclass(frozen=True, slots=True)
class _Model:
    """Bytes of one model of the trainer on each of its GPUs: fp32 parameters, AdamW's two moments, gradients.

    Attributes:
        count: Parameters.
        trained: Those that an optimizer moves.
    """

    place: Placement
    count: int
    trained: int

    @property
    def parameters(self) -> int:
        """Bytes on the GPU while the model is used."""
        return 0 if self.place.stays_on_cpu else 4 * self.count // self.place.shards

    @property
    def optimizer(self) -> int:
        """What of the optimizer stays on the GPU between updates."""
        away = self.place.stays_on_cpu or self.place.moves_optimizer
        return 0 if away else 8 * self.trained // self.place.shards

    @property
    def idle(self) -> int:
        """What stays on the GPU while the model is not used."""
        return (0 if self.place.moves_parameters else self.parameters) + self.optimizer

    @property
    def moved(self) -> int:
        """Bytes in the memory of the node instead."""
        parameters = 4 * self.count if self.place.moves_parameters or self.place.stays_on_cpu else 0
        optimizer = 8 * self.trained if self.place.moves_optimizer or self.place.stays_on_cpu else 0
        return (parameters + optimizer) // self.place.shards

    @property
    def updated(self) -> int:
        """Parameters, gradients and AdamW: verl brings back what it moved away before an update."""
        return 0 if self.place.stays_on_cpu else (4 * self.count + 12 * self.trained) // self.place.shards


def _actor(sizes: RunSizes, shape: ModelShape) -> _Model:
    trained = shape.adapters(sizes.lora_rank, "all") if sizes.lora_rank else shape.parameters
    return _Model(sizes.actor, shape.parameters, trained)


def _critic(sizes: RunSizes, shape: ModelShape) -> _Model | None:
    """The critic, whose head gives one number in place of a vocabulary."""
    count = shape.parameters - (0 if shape.tied else shape.embedding)
    return _Model(sizes.critic, count, count) if sizes.critic else None


def phases(sizes: RunSizes, shape: ModelShape) -> dict[str, MemoryNeed]:
    """What each GPU needs in each phase of a step, by the phase's name."""
    actor, critic = _actor(sizes, shape), _critic(sizes, shape)
    idle_critic = critic.idle if critic else 0
    static = round(sizes.engine.memory_share * sizes.hardware.gpu_gib * GIB)
    apart = sizes.engine.own_gpus is not None
    asleep = 0 if sizes.engine.sleeps or apart else static
    # verl wakes an engine that sleeps in two stages: the weights first, the cache once the trainer is away.
    awake = kv_cache(sizes, shape).weight_bytes if sizes.engine.sleeps else static
    largest = 4 * shape.embedding

    def forward(states: int, tokens: int) -> MemoryNeed:
        """A pass without gradients: nothing is kept but the layer under work and the logits."""
        logits = 0 if sizes.fused_logits else tokens * shape.vocab * _READ_LOGIT
        return MemoryNeed(states + largest, layer_bytes(shape, tokens, _BF16), logits, asleep)

    def update(model: _Model, others: int, logits: int) -> MemoryNeed:
        tokens = model.place.tokens
        activations = activation_bytes(shape, tokens, _BF16, checkpointing=sizes.checkpointing)
        return MemoryNeed(others + model.updated + largest, activations, logits, asleep)

    needs = {"rollout": MemoryNeed(0 if apart else actor.idle + idle_critic, engine=static)}
    sent = actor.parameters + actor.optimizer + idle_critic + _BUCKET
    needs["weights to engine"] = MemoryNeed(sent, engine=0 if apart else awake)
    needs["log-probs"] = forward(idle_critic + actor.parameters + actor.optimizer, sizes.log_prob_tokens)
    if sizes.reference is not None:
        reference = _Model(sizes.reference, shape.parameters, 0)
        needs["reference"] = forward(actor.idle + idle_critic + reference.parameters, sizes.reference.tokens)
    if critic is not None:
        needs["critic update"] = update(critic, actor.idle, 0)
    size = 0 if sizes.fused_logits else _TRAINED_LOGIT + _ENTROPY_LOGIT * sizes.entropy_bonus
    needs["actor update"] = update(actor, idle_critic, sizes.actor.tokens * shape.vocab * size)
    return needs


_CPU_TRAINED_COPIES, _CPU_READ_COPIES = 5, 4
"""Of the logits in float32 that a pass on a CPU holds at once, with and without gradients; nothing fuses them there."""
_CPU_PROCESSES = 4 * GIB
"""Ray, the agent loops, and the libraries of trainer and rollout engine."""


def cpu_need(sizes: RunSizes, shape: ModelShape, engines: int = 1) -> MemoryNeed:
    """What a run on a CPU needs where it needs most: float32 everywhere, and the engine's own copy of the weights.

    Args:
        engines: Processes of the rollout engine.
    """
    actor = _actor(sizes, shape)
    engine = 4 * shape.parameters * (engines + 1) + _CPU_PROCESSES  # one more while weights are on their way
    trained, read = sizes.actor.tokens, sizes.log_prob_tokens
    layers = activation_bytes(shape, trained, 4, checkpointing=sizes.checkpointing)
    update = MemoryNeed(actor.updated, layers, 4 * _CPU_TRAINED_COPIES * trained * shape.vocab, engine)
    reading = MemoryNeed(
        actor.updated, layer_bytes(shape, read, 4), 4 * _CPU_READ_COPIES * read * shape.vocab, engine
    )
    return max(update, reading, key=lambda need: need.total)


def cpu_memory_finding(sizes: RunSizes, shape: ModelShape, engines: int = 1) -> Finding:
    """Whether a run fits in the memory of this computer."""
    need = cpu_need(sizes, shape, engines)
    advice = "lower actor.ppo_micro_batch_size_per_gpu and rollout.log_prob_micro_batch_size_per_gpu"
    return cpu_finding(need.total, described(need, ""), advice)


def host_bytes(sizes: RunSizes, shape: ModelShape) -> int:
    """What verl keeps in the memory of one node for its GPUs: all that is moved there, and weights of engines.

    SGLang keeps a copy of its weights while it sleeps. vLLM does so for an adapter only: otherwise the next update brings
    all of them (verl/workers/rollout/vllm_rollout/vllm_async_server.py:1289).
    """
    critic = _critic(sizes, shape)
    total = _actor(sizes, shape).moved + (critic.moved if critic else 0)
    if sizes.reference is not None:
        total += 4 * shape.parameters // sizes.reference.shards
    sleeps = sizes.engine.sleeps and sizes.engine.own_gpus is None
    copied = sleeps and (sizes.engine.name != "vllm" or sizes.lora_rank > 0)
    engine = kv_cache(sizes, shape).weight_bytes if copied else 0
    return (total + engine) * sizes.hardware.gpus


def memory_findings(sizes: RunSizes, shape: ModelShape) -> Iterator[Finding]:
    """Every phase against the size of a GPU, and the episodes that the engines' cache holds."""
    gpu = sizes.hardware.gpu_gib
    for name, need in phases(sizes, shape).items():
        enough = fits(need.total, gpu)
        over = "" if enough else f", more than {gpu:g}; {_advice(sizes, name)}"
        yield Finding(Level.OK if enough else Level.WARNING, "memory", f"{name}: {described(need)}{over}")
    host = host_bytes(sizes, shape) / GIB
    yield Finding(Level.OK, "memory", f"each node's CPU holds {host:,.0f} GiB meanwhile")
    cache = kv_cache(sizes, shape)
    wanted = -(-sizes.episodes // max(1, sizes.engines))
    text = (
        f"{max(0, cache.tokens):,} tokens in each of {sizes.engines} engines ({cache.token_bytes / 1024:.0f} KiB a token "
        f"on each GPU): {cache.sequences} episodes of full length at once, of {wanted} that a step gives it"
    )
    if cache.sequences < 1:
        advice = "raise rollout.gpu_memory_utilization or tensor_model_parallel_size, or shorten the response"
        yield Finding(Level.ERROR, "kv cache", f"{text}; {advice}")
    else:
        yield Finding(Level.OK, "kv cache", text)


def _advice(sizes: RunSizes, phase: str) -> str:
    match phase:
        case "rollout" | "weights to engine":
            return "lower rollout.gpu_memory_utilization, or offload (fsdp_config.param_offload, optimizer_offload)"
        case "critic update":
            return "raise critic.fsdp.ulysses_sequence_parallel_size, use more GPUs, or critic.fsdp.offload_policy=true"
    longer = "lower ppo_max_token_len_per_gpu and raise ulysses_sequence_parallel_size"
    fused = "" if sizes.fused_logits else "model.use_fused_kernels=true, "
    return f"{fused}{longer}, use more GPUs, or fsdp_config.offload_policy=true"


_ACTOR_BYTES = {"model": 4, "optimizer": 8, "hf_model": 4}
"""Of a parameter: fp32 shards and AdamW's two moments; ``hf_model`` is the model again in one piece, also in fp32."""
_CRITIC_BYTES = 12


def checkpoint_finding(sizes: RunSizes, shape: ModelShape, folder: Path, steps: int | None) -> Finding:
    """Whether the checkpoints that exist at once and the exported model fit on the disk of ``folder``."""
    if sizes.save_every < 1:
        text = "trainer.save_freq is off: a run that ends early is lost, and no model is exported"
        return Finding(Level.WARNING, "disk", text)
    each = sum(size for name, size in _ACTOR_BYTES.items() if name in sizes.saved)
    each = (each + _CRITIC_BYTES * (sizes.critic is not None)) * shape.parameters
    written = None if steps is None else -(-steps // sizes.save_every)
    # With 1 to keep, verl removes the old one only when the new one is complete.
    limit = max(2, sizes.kept) if sizes.kept else written
    if limit is None:
        text = f"every checkpoint of {each / GIB:,.1f} GiB is kept, nobody knows how many"
        return Finding(Level.WARNING, "disk", f"{text}; set trainer.max_actor_ckpt_to_keep")
    kept = limit if written is None else min(limit, written)
    what = f"the exported model and {kept} checkpoint{'s' * (kept != 1)} of {each / GIB:,.1f} GiB"
    advice = "lower trainer.max_actor_ckpt_to_keep, or choose another output_dir"
    if "hf_model" in sizes.saved:
        advice += ", or leave hf_model out of save_contents (afm export puts the workers' parts together)"
    return disk_finding(4 * shape.parameters + kept * each, folder, what, advice)
