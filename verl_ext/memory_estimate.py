"""Arithmetic about memory and disk: each GPU in each phase of a step, the rollout engines' cache, the checkpoints.

Nobody has compared these figures with a GPU. They show what cannot fit; they promise nothing about what does. Trainer
and rollout engines share the GPUs: verl moves what it can away between the phases. FSDP2 keeps parameters, gradients
and AdamW in fp32 and computes in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from afm.findings import Finding, Level
from afm.memory_arithmetic import GIB, MemoryNeed, ModelShape, activation_bytes, disk_finding, layer_bytes
from verl_ext.workload import Placement, Workload

_BF16 = 2
_TRAINED_LOGIT, _ENTROPY_LOGIT, _READ_LOGIT = 4, 4, 6
"""Bytes of a logit: bf16 and its gradient; what an entropy bonus adds; bf16, softmax and product of a pass without
gradients, which computes the entropy for the metrics."""
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


def kv_cache(load: Workload, shape: ModelShape) -> KvCache:
    """The cache of one engine: its share of memory less the weights, by keys and values of every layer in bf16.

    An engine that splits a model over more GPUs than it has key-value heads keeps copies of them.
    """
    split = load.engine.tensor_parallel
    weights = _BF16 * shape.parameters // split
    token = 2 * _BF16 * shape.layers * max(1, shape.kv_heads // split) * shape.head_dim
    tokens = (round(load.engine.memory_share * load.hardware.gpu_gib * GIB) - weights) // token
    return KvCache(weights, token, tokens, max(0, tokens // load.longest))


def phases(load: Workload, shape: ModelShape) -> dict[str, MemoryNeed]:
    """What each GPU needs in each phase of a step, by the phase's name."""
    actor, critic = load.actor, load.critic
    kept_actor = _kept(actor, _trained(load, shape), shape.parameters)
    kept_critic = _kept(critic, _head_free(shape), _head_free(shape)) if critic else 0
    static = round(load.engine.memory_share * load.hardware.gpu_gib * GIB)
    apart = load.engine.own_gpus is not None
    asleep = 0 if load.engine.sleeps or apart else static
    # verl wakes an engine that sleeps in two stages: the weights first, the cache once the trainer is away.
    awake = kv_cache(load, shape).weight_bytes if load.engine.sleeps else static
    needs = {"rollout": MemoryNeed(0 if apart else kept_actor + kept_critic, engine=static)}
    needs["weights to engine"] = MemoryNeed(
        _parameters(actor, shape.parameters)
        + _kept_optimizer(actor, _trained(load, shape))
        + kept_critic
        + _BUCKET,
        engine=0 if apart else awake,
    )
    needs["log-probs"] = _forward(actor, shape, load.log_prob_tokens, load, kept_critic, asleep)
    if load.reference is not None:
        tokens = load.reference.tokens
        needs["reference"] = _forward(load.reference, shape, tokens, load, kept_actor + kept_critic, asleep)
    if critic is not None:
        needs["critic update"] = _update(
            critic,
            shape,
            _head_free(shape),
            _head_free(shape),
            load,
            logits=0,
            others=kept_actor,
            engine=asleep,
        )
    size = 0 if load.fused_logits else _TRAINED_LOGIT + _ENTROPY_LOGIT * load.entropy_bonus
    needs["actor update"] = _update(
        actor,
        shape,
        _trained(load, shape),
        shape.parameters,
        load,
        logits=actor.tokens * shape.vocab * size,
        others=kept_critic,
        engine=asleep,
    )
    return needs


def host_bytes(load: Workload, shape: ModelShape) -> int:
    """What verl keeps in the memory of one node for its GPUs: all that is moved there, and the engines' weights."""
    total = _moved(load.actor, _trained(load, shape), shape.parameters)
    if load.critic is not None:
        total += _moved(load.critic, _head_free(shape), _head_free(shape))
    if load.reference is not None:
        total += 4 * shape.parameters // load.reference.shards
    sleeps = load.engine.sleeps and load.engine.own_gpus is None
    engine = kv_cache(load, shape).weight_bytes if sleeps else 0
    return (total + engine) * load.hardware.gpus


def _trained(load: Workload, shape: ModelShape) -> int:
    return shape.adapters(load.lora_rank, "all") if load.lora_rank else shape.parameters


def _head_free(shape: ModelShape) -> int:
    """Parameters of a critic: the head gives one number in place of a vocabulary."""
    return shape.parameters - (0 if shape.tied else shape.embedding)


def _parameters(place: Placement, count: int) -> int:
    return 0 if place.stays_on_cpu else 4 * count // place.shards


def _kept_optimizer(place: Placement, trained: int) -> int:
    return 0 if place.stays_on_cpu or place.moves_optimizer else 8 * trained // place.shards


def _kept(place: Placement, trained: int, count: int) -> int:
    """What stays on the GPU while the model is not used."""
    return (0 if place.moves_parameters else _parameters(place, count)) + _kept_optimizer(place, trained)


def _moved(place: Placement, trained: int, count: int) -> int:
    parameters = 4 * count if place.moves_parameters or place.stays_on_cpu else 0
    optimizer = 8 * trained if place.moves_optimizer or place.stays_on_cpu else 0
    return (parameters + optimizer) // place.shards


def _forward(
    place: Placement, shape: ModelShape, tokens: int, load: Workload, others: int, engine: int
) -> MemoryNeed:
    """A pass without gradients: nothing is kept but the layer under work and the logits."""
    states = others + _parameters(place, shape.parameters) + 4 * shape.embedding
    if place is load.actor:
        states += _kept_optimizer(place, _trained(load, shape))
    layer = layer_bytes(shape, tokens, _BF16)
    logits = 0 if load.fused_logits else tokens * shape.vocab * _READ_LOGIT
    return MemoryNeed(states, layer, logits, engine)


def _update(
    place: Placement,
    shape: ModelShape,
    trained: int,
    count: int,
    load: Workload,
    *,
    logits: int,
    others: int,
    engine: int,
) -> MemoryNeed:
    """Parameters, gradients and AdamW are all there: verl brings back what it moved away before an update."""
    own = 0 if place.stays_on_cpu else (4 * count + 12 * trained) // place.shards
    activations = activation_bytes(shape, place.tokens, _BF16, checkpointing=load.checkpointing)
    return MemoryNeed(others + own + 4 * shape.embedding, activations, logits, engine)


_ACTOR_BYTES = {"model": 4, "optimizer": 8, "hf_model": 4}
"""Of a parameter: fp32 shards and AdamW's two moments; ``hf_model`` is the model once more in one piece, in fp32 too."""
_CRITIC_BYTES = 12


def checkpoint_finding(load: Workload, shape: ModelShape, folder: Path, steps: int | None) -> Finding:
    """Whether the checkpoints that stand at once and the exported model fit on the disk of ``folder``."""
    if load.save_every < 1:
        text = "trainer.save_freq is off: a run that ends early is lost, and no model is exported"
        return Finding(Level.WARNING, "disk", text)
    each = sum(size for name, size in _ACTOR_BYTES.items() if name in load.saved)
    each = (each + _CRITIC_BYTES * (load.critic is not None)) * shape.parameters
    written = None if steps is None else -(-steps // load.save_every)
    # With 1 to keep, verl removes the old one only when the new one is complete.
    limit = max(2, load.kept) if load.kept else written
    if limit is None:
        text = f"every checkpoint of {each / GIB:,.1f} GiB is kept, nobody knows how many"
        return Finding(Level.WARNING, "disk", f"{text}; set trainer.max_actor_ckpt_to_keep")
    kept = limit if written is None else min(limit, written)
    what = f"the exported model and {kept} checkpoint{'s' * (kept != 1)} of {each / GIB:,.1f} GiB"
    advice = "lower trainer.max_actor_ckpt_to_keep, or choose another output_dir"
    if "hf_model" in load.saved:
        advice += ", or leave hf_model out of save_contents (afm export puts the workers' parts together)"
    return disk_finding(4 * shape.parameters + kept * each, folder, what, advice)
