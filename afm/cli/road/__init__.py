"""``afm road``: from the published data of an agent to a report, in stages; ``train/<agent>/all.sh`` calls it."""

from __future__ import annotations

from afm.cli.road.command import road

__all__ = ["road"]
