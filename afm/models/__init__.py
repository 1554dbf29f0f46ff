"""Models that act: token ids in, token ids out."""

from __future__ import annotations

from afm.models.base import FinishReason, Generation, SamplingParams, TokenModel
from afm.models.load import load_model
from afm.models.scripted import ScriptedModel
from afm.models.streaming import StreamingModel

__all__ = [
    "FinishReason",
    "Generation",
    "SamplingParams",
    "ScriptedModel",
    "StreamingModel",
    "TokenModel",
    "load_model",
]
