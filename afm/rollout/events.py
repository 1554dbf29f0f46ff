"""What an episode tells while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from afm.trajectory.record import CallRecord, StopReason
from afm.trajectory.types import Author


@dataclass(frozen=True, slots=True)
class TextAdded:
    """Text was appended to the response."""

    author: Author
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool is about to run."""

    role: str
    tool: str
    argument: str


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A tool has answered."""

    call: CallRecord


@dataclass(frozen=True, slots=True)
class EpisodeStopped:
    """The episode is over."""

    stop: StopReason


EpisodeEvent = TextAdded | CallStarted | CallFinished | EpisodeStopped
