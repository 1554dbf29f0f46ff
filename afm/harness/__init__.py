"""Record the conversations of external agent programs as the tokens that the model sampled."""

from __future__ import annotations

from afm.harness.history import Branch, Sampled, SampledTurn
from afm.harness.rendering import ChatRenderer
from afm.harness.requests import ModelChoice, ModelReply, ModelRequest, RequestRefusedError
from afm.harness.server import HarnessServer
from afm.harness.sessions import Session, SessionLimits

__all__ = [
    "Branch",
    "ChatRenderer",
    "HarnessServer",
    "ModelChoice",
    "ModelReply",
    "ModelRequest",
    "RequestRefusedError",
    "Sampled",
    "SampledTurn",
    "Session",
    "SessionLimits",
]
