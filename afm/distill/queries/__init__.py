"""Which questions are worth reinforcing on: those that a model does not answer anyway (AFM, arXiv 2508.13167)."""

from afm.distill.queries.askers import (
    Answered,
    ChatAsker,
    EpisodeAsker,
    QuestionAsker,
    by_exact_match,
    by_reward,
    settings_digest,
)
from afm.distill.queries.select import QuerySummary, known_questions, question_key, select_queries
from afm.distill.queries.settings import PRESETS, FailedQuestions, QueryConfig, QuerySettings

__all__ = [
    "PRESETS",
    "Answered",
    "ChatAsker",
    "EpisodeAsker",
    "FailedQuestions",
    "QueryConfig",
    "QuerySettings",
    "QuerySummary",
    "QuestionAsker",
    "by_exact_match",
    "by_reward",
    "known_questions",
    "question_key",
    "select_queries",
    "settings_digest",
]
