"""Refuses rewards that are no numbers: one NaN among a group's rewards makes every advantage of it NaN, and then the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from afm.errors import RewardError


def refuse_non_finite(facts: Mapping[str, Any], *, data_source: str, episode: str) -> None:
    """Let only finite numbers pass.

    Args:
        facts: Parts of a reward and their combination, by name; what is no number is not looked at.
        data_source: Of the question.
        episode: Which one, in the words that the logs and the kept episodes have for it.

    Raises:
        RewardError: A value is NaN or infinite; it names them all.
    """
    wrong = {
        name: value for name, value in facts.items() if isinstance(value, Real) and not math.isfinite(value)
    }
    if wrong:
        listed = ", ".join(f"{name} = {float(value):g}" for name, value in wrong.items())
        raise RewardError(
            f"the reward of episode {episode} (data_source {data_source!r}) is no finite number: {listed}; expected a number. "
            "Repair the scorer of this data_source, or let it abstain (a score of None), which leaves the sample out"
        )
