"""Isolation for model-written code. No isolation, no run: there is no unsafe mode."""

from afm.sandbox.backends import limits_from, open_sandbox
from afm.sandbox.base import ExitReason, NamelessInput, RunResult, Sandbox, SandboxLimits

__all__ = [
    "ExitReason",
    "NamelessInput",
    "RunResult",
    "Sandbox",
    "SandboxLimits",
    "limits_from",
    "open_sandbox",
]
