"""The episode loop: a model acts as an agent, with real tools, token by token."""

from __future__ import annotations

from afm.rollout.episode_loop import run_episode
from afm.rollout.published_protocol import PublishedProtocol, run_published
from afm.rollout.transcript import (
    CallFinished,
    CallStarted,
    Episode,
    EpisodeEvent,
    OnEvent,
    Stopped,
    TextWritten,
    episode_record,
)

__all__ = [
    "CallFinished",
    "CallStarted",
    "Episode",
    "EpisodeEvent",
    "OnEvent",
    "PublishedProtocol",
    "Stopped",
    "TextWritten",
    "episode_record",
    "run_episode",
    "run_published",
]
