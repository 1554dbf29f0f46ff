"""What an episode reports while it runs, for a live view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from afm.trajectory.record import CallRecord, StopReason


@dataclass(frozen=True, slots=True)
class TextWritten:
    """The agent or the environment wrote a piece of text.

    Attributes:
        text: The piece; tags come as pieces of their own.
        role: The role it belongs to, ``None`` between roles.
        by_agent: False for an observation.
    """

    text: str
    role: str | None
    by_agent: bool = True


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool begins to work."""

    role: str
    tool: str
    argument: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A tool is done, or the call was a repeated one."""

    call: CallRecord


@dataclass(frozen=True, slots=True)
class Stopped:
    """The episode is over."""

    reason: StopReason


EpisodeEvent = TextWritten | CallStarted | CallFinished | Stopped
OnEvent = Callable[[EpisodeEvent], None]
