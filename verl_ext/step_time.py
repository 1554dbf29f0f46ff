"""Tokens and seconds of a step, by arithmetic that was never compared with a GPU; see :mod:`afm.planning.speed`.

Not counted: waiting for tools and judges, moving weights and states, saving, the optimizer's own arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from afm.planning import ModelShape
from afm.planning.speed import (
    Assumptions,
    compute_s,
    decode_tokens_per_s,
    forward_flops,
    training_flops,
)
from verl_ext.gpu_memory import kv_cache
from verl_ext.workload import Workload


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step.

    Attributes:
        sampled: Tokens that the agent writes, those of dropped groups included.
        trained: Tokens of the samples that are trained on, prompts and observations included.
        at_once: Episodes that one engine decodes together.
        overlap: Rollouts and training go on at the same time.
    """

    sampled: int
    trained: int
    at_once: int
    rollout_s: float
    training_s: float
    overlap: bool

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        both = (self.rollout_s, self.training_s)
        return max(both) if self.overlap else sum(both)


def step_time(load: Workload, shape: ModelShape, given: Assumptions) -> StepTime | None:
    """A step of average lengths; ``None`` when the engines have no room for one episode."""
    prompt, response = given.length_share * load.prompt, given.length_share * load.response
    length = prompt + response
    episodes = load.episodes * (given.groups if load.filtered else 1.0)
    room = int(kv_cache(load, shape).tokens // length)
    at_once = min(room, load.engine.sequences, -(-int(episodes) // max(1, load.engines)))
    if at_once < 1 or load.engines < 1:
        return None
    sampled = episodes * response * given.agent_share
    read = episodes * (length - response * given.agent_share)
    rate = load.engines * decode_tokens_per_s(shape, load.engine.gpus, at_once, prompt + response / 2, given)
    world = load.hardware.world
    served = load.engine.own_gpus or world
    prefill_s = compute_s(forward_flops(shape, read, length), served, given.prefill_mfu, given)
    trained = load.episodes * length
    passes = 1 + (load.reference is not None) + (load.critic is not None)  # probabilities, values
    updates = load.passes + (load.critic is not None)
    flops = passes * forward_flops(shape, trained, length)
    flops += updates * training_flops(shape, trained, length, checkpointing=load.checkpointing)
    return StepTime(
        sampled=round(sampled),
        trained=round(trained),
        at_once=at_once,
        rollout_s=(sampled / rate + prefill_s) * given.tail,
        training_s=compute_s(flops, world, given.train_mfu, given),
        overlap=load.engine.own_gpus is not None,
    )
