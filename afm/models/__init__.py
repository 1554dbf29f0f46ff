"""Models that act: token ids in, token ids out."""

from __future__ import annotations

from afm.models.base import FinishReason, Generation, SamplingParams, TokenModel

__all__ = ["FinishReason", "Generation", "SamplingParams", "TokenModel"]
