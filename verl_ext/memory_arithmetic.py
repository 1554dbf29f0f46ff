"""Estimates of memory and disk: each GPU in each phase of a step, the rollout engines' cache, the checkpoints.

The figures were never compared with a GPU. They show what cannot fit, and do not guarantee that the rest does. Trainer
and rollout engines share the GPUs, and verl moves what it can to the CPU between the phases. FSDP2 keeps parameters,
gradients and AdamW in fp32 and computes in bf16.
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
    gpu_finding,
    layer_bytes,
    size_text,
)
from afm.terminal import plural
from verl_ext.sizes import Placement, RunSizes

_BF16 = 2
_TRAINED_LOGIT, _ENTROPY_LOGIT, _READ_LOGIT = 4, 4, 6
"""Bytes per logit of a training pass (bf16 and its gradient), of an entropy bonus, and of a pass without gradients (bf16,
softmax and product, for the entropy in the metrics)."""
_BUCKET = 2 * GIB
"""Bytes of weights in transfer to the engine (``checkpoint_engine.update_weights_bucket_megabytes``)."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """Capacity of a rollout engine's cache.

    Attributes:
        weight_bytes: Bytes of the model on each GPU.
        token_bytes: Bytes of one token on each GPU of an engine.
        tokens: Tokens in one engine, negative if the weights alone do not fit.
        sequences: Sequences of full length in one engine.
    """

    weight_bytes: int
    token_bytes: int
    tokens: int
    sequences: int


def kv_cache(sizes: RunSizes, shape: ModelShape) -> KvCache:
    """Return the cache of one engine: its share of memory minus the weights, divided by keys and values of all layers in bf16.

    An engine that splits a model over more GPUs than the model has key-value heads keeps copies of the heads.
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
        count: Number of parameters.
        trained: Number of parameters that the optimizer updates.
    """

    place: Placement
    count: int
    trained: int

    @property
    def parameters(self) -> int:
        """Bytes of parameters on the GPU while the model is used."""
        return 0 if self.place.stays_on_cpu else 4 * self.count // self.place.shards

    @property
    def optimizer(self) -> int:
        """Bytes of the optimizer that stay on the GPU between updates."""
        away = self.place.stays_on_cpu or self.place.moves_optimizer
        return 0 if away else 8 * self.trained // self.place.shards

    @property
    def idle(self) -> int:
        """Bytes that stay on the GPU while the model is not used."""
        return (0 if self.place.moves_parameters else self.parameters) + self.optimizer

    @property
    def moved(self) -> int:
        """Bytes that are moved to the memory of the node."""
        parameters = 4 * self.count if self.place.moves_parameters or self.place.stays_on_cpu else 0
        optimizer = 8 * self.trained if self.place.moves_optimizer or self.place.stays_on_cpu else 0
        return (parameters + optimizer) // self.place.shards

    @property
    def updated(self) -> int:
        """Bytes of parameters, gradients and AdamW during an update, for which verl moves everything back to the GPU."""
        return 0 if self.place.stays_on_cpu else (4 * self.count + 12 * self.trained) // self.place.shards


def _actor(sizes: RunSizes, shape: ModelShape) -> _Model:
    trained = shape.adapters(sizes.lora_rank, "all") if sizes.lora_rank else shape.parameters
    return _Model(sizes.actor, shape.parameters, trained)


def _critic(sizes: RunSizes, shape: ModelShape) -> _Model | None:
    """Return the critic, whose head outputs one number instead of a vocabulary."""
    count = shape.parameters - (0 if shape.tied else shape.embedding)
    return _Model(sizes.critic, count, count) if sizes.critic else None


def phases(sizes: RunSizes, shape: ModelShape) -> dict[str, MemoryNeed]:
    """Return the memory that each GPU needs in each phase of a step, by the name of the phase."""
    actor, critic = _actor(sizes, shape), _critic(sizes, shape)
    idle_critic = critic.idle if critic else 0
    static = round(sizes.engine.memory_share * sizes.hardware.gpu_gib * GIB)
    apart = sizes.engine.own_gpus is not None
    asleep = 0 if sizes.engine.sleeps or apart else static
    # verl wakes a sleeping engine in two stages: first the weights, then the cache once the trainer has freed its memory.
    awake = kv_cache(sizes, shape).weight_bytes if sizes.engine.sleeps else static
    largest = 4 * shape.embedding

    def forward(states: int, tokens: int) -> MemoryNeed:
        """Return the need of a pass without gradients, which keeps only the current layer and the logits."""
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
"""Copies of the float32 logits that a pass on a CPU holds at once, with and without gradients. No kernel fuses them."""
_CPU_PROCESSES = 4 * GIB
"""Bytes of Ray, the agent loops, and the libraries of trainer and rollout engine."""
_CPU_ENGINE = 3 * GIB // 2
"""Bytes of the libraries and the cache of each further engine process."""


def cpu_need(sizes: RunSizes, shape: ModelShape, engines: int = 1) -> MemoryNeed:
    """Return the peak memory of a run on a CPU: float32 everywhere, and the engine's own copies of the weights.

    Args:
        engines: Number of processes of the rollout engine.
    """
    actor = _actor(sizes, shape)
    # One copy more during the transfer of weights.
    engine = 4 * shape.parameters * (engines + 1) + _CPU_PROCESSES + _CPU_ENGINE * (engines - 1)
    trained, read = sizes.actor.tokens, sizes.log_prob_tokens
    layers = activation_bytes(shape, trained, 4, checkpointing=sizes.checkpointing)
    update = MemoryNeed(actor.updated, layers, 4 * _CPU_TRAINED_COPIES * trained * shape.vocab, engine)
    reading = MemoryNeed(
        actor.updated, layer_bytes(shape, read, 4), 4 * _CPU_READ_COPIES * read * shape.vocab, engine
    )
    return max(update, reading, key=lambda need: need.total)


def cpu_memory_finding(sizes: RunSizes, shape: ModelShape, engines: int = 1) -> Finding:
    """Report whether a run fits in the memory of this computer."""
    need = cpu_need(sizes, shape, engines)
    advice = "lower actor.ppo_micro_batch_size_per_gpu and rollout.log_prob_micro_batch_size_per_gpu"
    return cpu_finding(need.total, described(need, ""), advice)


def host_bytes(sizes: RunSizes, shape: ModelShape) -> int:
    """Return the bytes in the memory of one node: everything that verl moves there from its GPUs, and weights of engines.

    SGLang keeps a copy of its weights while it sleeps. vLLM does so only in a LoRA run. In other runs the next update
    transfers all weights (verl/workers/rollout/vllm_rollout/vllm_async_server.py:1289).
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
    """Compare every phase with the memory of a GPU, and report the episodes that the engines' cache holds."""
    gpu = sizes.hardware.gpu_gib
    for name, need in phases(sizes, shape).items():
        yield gpu_finding(name, need, gpu, _advice(sizes, name))
    host = host_bytes(sizes, shape) / GIB
    yield Finding(Level.OK, "memory", f"each node also holds {host:,.0f} GiB in CPU memory")
    cache = kv_cache(sizes, shape)
    wanted = -(-sizes.episodes // max(1, sizes.engines))
    text = (
        f"{max(0, cache.tokens):,} tokens in each of {plural(sizes.engines, 'engine')} ({cache.token_bytes / 1024:.0f} KiB per token "
        f"on each GPU): {plural(cache.sequences, 'episode')} of full length at once, out of {wanted} that each gets per step"
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
"""Bytes per parameter: fp32 shards and AdamW's two moments. ``hf_model`` is a second, complete copy in fp32."""
_CRITIC_BYTES = 12


def checkpoint_finding(
    sizes: RunSizes, shape: ModelShape, folder: Path, steps: int | None, *, here: bool = True
) -> Finding:
    """Report whether the checkpoints that exist at once and the exported model fit on the disk of ``folder``."""
    if sizes.save_every < 1:
        text = "trainer.save_freq is off: a run that ends early is lost, and no model is exported"
        return Finding(Level.WARNING, "disk", text)
    each = sum(size for name, size in _ACTOR_BYTES.items() if name in sizes.saved)
    each = (each + _CRITIC_BYTES * (sizes.critic is not None)) * shape.parameters
    written = None if steps is None else -(-steps // sizes.save_every)
    # With 1 to keep, verl removes the old one only when the new one is complete.
    limit = max(2, sizes.kept) if sizes.kept else written
    if limit is None:
        text = f"every checkpoint of {size_text(each)} is kept, and their number is unknown"
        return Finding(Level.WARNING, "disk", f"{text}; set trainer.max_actor_ckpt_to_keep")
    kept = limit if written is None else min(limit, written)
    passing = ", the last one only until the next is whole" if sizes.kept and kept > sizes.kept else ""
    what = f"the exported model and {plural(kept, 'checkpoint')} of {size_text(each)}{passing}"
    advice = "lower trainer.max_actor_ckpt_to_keep, or choose another output_dir"
    if "hf_model" in sizes.saved:
        advice += ", or leave hf_model out of save_contents (afm export merges the workers' shards)"
    return disk_finding(4 * shape.parameters + kept * each, folder, what, advice, here=here)
