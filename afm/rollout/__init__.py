"""Episodes: a model, its tools and the limits, in one loop."""

from afm.rollout.convert import episode_record
from afm.rollout.episode import Episode
from afm.rollout.events import CallFinished, CallStarted, EpisodeEvent, EpisodeStopped, TextAdded
from afm.rollout.loop import run_episode

__all__ = [
    "CallFinished",
    "CallStarted",
    "Episode",
    "EpisodeEvent",
    "EpisodeStopped",
    "TextAdded",
    "episode_record",
    "run_episode",
]
