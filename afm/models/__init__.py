"""Models that act: token ids in, token ids out."""

from __future__ import annotations

from afm.models.base import (
    FinishReason,
    Generation,
    SamplingParams,
    ScriptedModel,
    StreamingModel,
    TokenModel,
)
from afm.models.load import load_model

__all__ = [
    "FinishReason",
    "Generation",
    "SamplingParams",
    "ScriptedModel",
    "StreamingModel",
    "TokenModel",
    "load_model",
]
