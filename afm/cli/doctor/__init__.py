"""``afm doctor``: this computer, or the configuration of a run, looked at before anything costs time."""

from __future__ import annotations

from afm.cli.doctor.command import doctor

__all__ = ["doctor"]
