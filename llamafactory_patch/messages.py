"""The aligned form that LLaMA-Factory's processors take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from afm.errors import DataError

Aligned = dict[str, Any]
"""``_prompt``, ``_response``, ``_system``, ``_tools`` and the media columns of one row."""

_USER_SIDE = ("user", "observation")
_ASSISTANT_SIDE = ("assistant", "function")


def turn(role: str, content: str, *, loss: bool = True) -> dict[str, Any]:
    """One turn; ``loss`` matters for the assistant's alone."""
    return {"role": role, "content": content, "loss": loss}


def aligned_row(turns: Sequence[dict[str, Any]], *, system: str = "", tools: str = "") -> Aligned:
    """A row whose last turn is the response."""
    return {
        "_prompt": list(turns[:-1]),
        "_response": list(turns[-1:]),
        "_system": system,
        "_tools": tools,
        "_images": None,
        "_videos": None,
        "_audios": None,
    }


def alternating(prompt: Sequence[Mapping[str, Any]]) -> None:
    """Check that a prompt begins and ends with the user's side, in alternation with the assistant's.

    Raises:
        DataError: It does not.
    """
    sides = (_USER_SIDE, _ASSISTANT_SIDE)
    sound = all(message["role"] in sides[number % 2] for number, message in enumerate(prompt))
    if not sound or len(prompt) % 2 != 1:
        raise DataError("expected turns of user and assistant in alternation, the assistant's last")
