"""``afm ask``: one question, or a whole conversation, answered live."""

from __future__ import annotations

from afm.cli.ask.command import ask

__all__ = ["ask"]
