"""Trajectories from and to the formats of others (docs/formats.md)."""

from __future__ import annotations

from afm.trajectory.convert.base import Context
from afm.trajectory.convert.files import FORMATS, convert_file, detected, read_converted

__all__ = ["FORMATS", "Context", "convert_file", "detected", "read_converted"]
