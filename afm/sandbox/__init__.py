"""Isolation for model-written code. No isolation, no run: there is no unsafe mode."""

from afm.sandbox.backends import open_sandbox
from afm.sandbox.base import ExitReason, NamelessInput, RunResult, Sandbox
from afm.sandbox.settings import SandboxLimits, SandboxSettings, limits_from

__all__ = [
    "ExitReason",
    "NamelessInput",
    "RunResult",
    "Sandbox",
    "SandboxLimits",
    "SandboxSettings",
    "limits_from",
    "open_sandbox",
]
