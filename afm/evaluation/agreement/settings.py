"""The ``agreement`` part of an evaluation's YAML."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from afm.rewards.judge import JudgeSettings


class AgreementSettings(BaseModel):
    """Who judges again, and how much.

    Attributes:
        judges: Judges as in a reward file; with its defaults GRM_BASE_URL's, which repeats the run's own judge.
        repeats: How often each of them judges; verdicts of one judge are compared with each other, too.
        episodes: So many of those that need a judge, chosen by ``seed``; ``None`` for all.
        max_failed_share: Share of the verdicts that may fail before this ends with an error.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    judges: tuple[JudgeSettings, ...] = Field(default=(JudgeSettings(),), min_length=1)
    repeats: int = Field(default=1, ge=1)
    episodes: int | None = Field(default=None, ge=1)
    seed: int = 0
    max_failed_share: float = Field(default=0.1, ge=0, le=1)
