"""The ``best_of`` part of an evaluation's YAML."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from afm.evaluation.choosing.best_of import Method
from afm.rewards.judge_endpoint import JudgeEndpoint


class BestOfSettings(BaseModel):
    """How a judge chooses among episodes of a question.

    Attributes:
        sizes: The k of best-of-k, each at least 2.
        methods: ``list``, ``score`` or both.
        judge: Its server, GRM_BASE_URL and GRM_MODEL_NAME by default.
        work_chars: Of an episode's work, its end, that the judge is shown; 0 shows the answer alone.
        max_answer_chars: Of an answer.
        seed: Decides in which order episodes are listed, so that no place is favoured.
        max_failed_share: Share of the choices and grades that the judge may fail to give before this ends with an error.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sizes: tuple[int, ...] = Field(default=(3,), min_length=1)
    methods: tuple[Method, ...] = Field(default=(Method.LIST,), min_length=1)
    judge: JudgeEndpoint = JudgeEndpoint()
    work_chars: int = Field(default=4000, ge=0)
    max_answer_chars: int = Field(default=1000, ge=1)
    seed: int = 0
    max_failed_share: float = Field(default=0.1, ge=0, le=1)

    @field_validator("sizes")
    @classmethod
    def _at_least_two(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if min(sizes) < 2 or len(set(sizes)) != len(sizes):
            raise ValueError("different whole numbers of at least 2")
        return sizes
