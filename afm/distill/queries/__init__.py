"""Which questions are worth reinforcing on: those that a model does not answer anyway (AFM, arXiv 2508.13167)."""

from afm.distill.queries.askers import (
    Answered,
    Asker,
    ChatAsker,
    EpisodeAsker,
    by_exact_match,
    by_reward,
    settings_digest,
)
from afm.distill.queries.select import QuerySummary, known_questions, question_key, select_queries
from afm.distill.queries.settings import PRESETS, OnFailed, QueryConfig, QuerySettings

__all__ = [
    "PRESETS",
    "Answered",
    "Asker",
    "ChatAsker",
    "EpisodeAsker",
    "OnFailed",
    "QueryConfig",
    "QuerySettings",
    "QuerySummary",
    "by_exact_match",
    "by_reward",
    "known_questions",
    "question_key",
    "select_queries",
    "settings_digest",
]
