"""Episodes that came to no proper end, and what may keep them out of training."""

from __future__ import annotations

from enum import StrEnum

from afm.rollout import Episode
from afm.trajectory.record import StopReason

CUT_SHORT = {
    StopReason.TURNS,
    StopReason.AGENT_TOKENS,
    StopReason.RESPONSE_TOKENS,
    StopReason.SECONDS,
    StopReason.TOOL_SECONDS,
    StopReason.ABORTED,
}


class Unfinished(StrEnum):
    """Episodes that can be left out of training, loss and group's mean alike (``leave_out``)."""

    TRUNCATED = "truncated"
    """A limit on turns, tokens or time ended it (DAPO's overlong filtering, arXiv 2503.14476, section 3.4)."""
    VOID = "void"
    """It ended with neither a call nor an answer (void turns of SimpleTIR, arXiv 2509.02479)."""
    FAILED = "failed"
    """A tool gave no result, or the engine broke off: not the agent's doing."""


def unfinished(episode: Episode) -> set[Unfinished]:
    """What keeps an episode from being a fair sample."""
    found = set()
    if episode.stop in CUT_SHORT - {StopReason.ABORTED}:
        found.add(Unfinished.TRUNCATED)
    if episode.stop in (StopReason.END_OF_TEXT, StopReason.FORGED_OBSERVATION):
        found.add(Unfinished.VOID)
    if episode.stop is StopReason.ABORTED or episode.cost.tool_failures:
        found.add(Unfinished.FAILED)
    return found
