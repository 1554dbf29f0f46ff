"""Rows of verl's RL layout: the question in ``prompt``, the gold answer in ``reward_model.ground_truth``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import listed, mapping, shown, text
from afm.errors import DataError


def asked(row: Mapping[str, Any]) -> str:
    """The last turn of the user.

    Raises:
        DataError: There is none.
    """
    turns = [
        turn for turn in listed(row.get("prompt")) if isinstance(turn, Mapping) and turn.get("role") == "user"
    ]
    if not turns:
        raise DataError(f"`prompt`: expected [{{role: user, content}}], got {shown(row.get('prompt'))}")
    return text(turns[-1], "content")


def gold_of(row: Mapping[str, Any]) -> str:
    """The gold answer as it is written.

    Raises:
        DataError: There is none.
    """
    return text(mapping(row.get("reward_model"), "reward_model"), "ground_truth")
