"""What a training would need, checked before it costs time: findings, hardware, memory. Engines' plugins build on it."""

from __future__ import annotations

from afm.planning.findings import Finding, Level, Report, failed
from afm.planning.memory import (
    Hardware,
    ModelShape,
    hardware_from,
    missing_model_files,
    model_shape,
    positive_variable,
    recipe_hardware,
)

__all__ = [
    "Finding",
    "Hardware",
    "Level",
    "ModelShape",
    "Report",
    "failed",
    "hardware_from",
    "missing_model_files",
    "model_shape",
    "positive_variable",
    "recipe_hardware",
]
