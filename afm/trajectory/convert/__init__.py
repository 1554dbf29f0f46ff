"""Trajectories from and to the formats of others (docs/formats.md)."""

from __future__ import annotations

from afm.trajectory.convert.base import Context, Format, Read
from afm.trajectory.convert.files import Converted, convert_file, detected, read_converted
from afm.trajectory.convert.registry import FORMATS, format_named

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
