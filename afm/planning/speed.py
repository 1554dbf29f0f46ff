"""How long arithmetic takes: FLOPs of a dense decoder by a stated utilisation, decoding by a stated memory throughput.

None of it was ever compared with a GPU. Forward pass: 2 FLOPs a parameter and token (Kaplan et al., arXiv 2001.08361,
section 2.1), plus the attention's products with all earlier tokens; backward twice that; checkpointing computes
the forward pass again (Narayanan et al., arXiv 2104.04473, appendix).
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from afm.planning.model_shape import ModelShape

_BF16 = 2


class Assumptions(BaseModel):
    """What the arithmetic takes for granted; each can be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    peak_tflops: float = Field(
        default=989.0, gt=0, description="Dense bf16 of one GPU, by the data sheet of an NVIDIA H100 SXM."
    )
    bandwidth_tb_s: float = Field(
        default=3.35, gt=0, description="Of one GPU's memory, by the same data sheet."
    )
    train_mfu: float = Field(default=0.35, gt=0, le=1, description="Share of the peak that training reaches.")
    prefill_mfu: float = Field(
        default=0.4, gt=0, le=1, description="Share of the peak that an engine reaches where it computes."
    )
    decode_bandwidth: float = Field(
        default=0.6, gt=0, le=1, description="Share of the bandwidth that an engine reaches where it reads."
    )
    length_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Mean length of prompts and responses, as a share of their limits.",
    )
    agent_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of a response that the agent writes; the rest is observed.",
    )
    groups: float = Field(
        default=1.5, ge=1, description="Groups generated for each one trained on, with group filtering."
    )
    tail: float = Field(
        default=1.5, ge=1, description="Time of a step's rollouts against that of engines busy to the end."
    )


def forward_flops(shape: ModelShape, tokens: float, length: float) -> float:
    """Of ``tokens`` in sequences of ``length``: every token looks back on half of its sequence in the mean."""
    matrices = shape.parameters - (0 if shape.tied else shape.embedding)
    attention = 2 * shape.layers * shape.heads * shape.head_dim * length
    return tokens * (2 * matrices + attention)


def training_flops(shape: ModelShape, tokens: float, length: float, *, checkpointing: bool) -> float:
    """Of a forward and a backward pass."""
    return forward_flops(shape, tokens, length) * (4 if checkpointing else 3)


def compute_s(flops: float, gpus: int, mfu: float, given: Assumptions) -> float:
    """Seconds that ``gpus`` need for so many FLOPs."""
    return flops / (gpus * given.peak_tflops * 1e12 * mfu)


def decode_tokens_per_s(
    shape: ModelShape, gpus: int, sequences: int, context: float, given: Assumptions
) -> float:
    """Tokens a second of one engine that decodes ``sequences`` at once, each ``context`` tokens long in the mean.

    A step reads all weights and the cached keys and values of every sequence, or computes, whichever takes longer.
    """
    cached = 2 * _BF16 * shape.layers * max(shape.kv_heads, gpus) * shape.head_dim
    read = _BF16 * shape.parameters + sequences * context * cached
    reading_s = read / (gpus * given.bandwidth_tb_s * 1e12 * given.decode_bandwidth)
    flops = forward_flops(shape, sequences, 2 * context)
    return sequences / max(reading_s, compute_s(flops, gpus, given.prefill_mfu, given))
