"""Whether batches, models and GPUs divide as verl and its engines need it."""

from __future__ import annotations

from collections.abc import Iterator

from afm.planning import Finding, Level, ModelShape
from verl_ext.workload import Workload


def split_findings(load: Workload, shape: ModelShape | None) -> Iterator[Finding]:
    """One finding for each thing that does not divide; one that says how it divides when all do."""
    faults = [*_gpus(load), *_batches(load), *(_model(load, shape) if shape else ())]
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


def _gpus(load: Workload) -> Iterator[str]:
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


def _batches(load: Workload) -> Iterator[str]:
    gen = load.gen_batch
    if gen and not _one_by_one(load) and load.batch % gen:
        yield f"data.train_batch_size={load.batch} is no multiple of data.gen_batch_size={gen}; leave the second out"


def _model(load: Workload, shape: ModelShape) -> Iterator[str]:
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
