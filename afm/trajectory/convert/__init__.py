"""Trajectories from and to the formats of others (docs/formats.md)."""

from __future__ import annotations

from afm.trajectory.convert.base import Context, Format, Read
from afm.trajectory.convert.files import (
    FORMATS,
    Converted,
    convert_file,
    detected,
    format_named,
    read_converted,
)

__all__ = [
    "FORMATS",
    "Context",
    "Converted",
    "Format",
    "Read",
    "convert_file",
    "detected",
    "format_named",
    "read_converted",
]
