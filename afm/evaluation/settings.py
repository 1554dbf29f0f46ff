"""Settings of who answers and who judges: the model, a team, sampling, best-of-k and agreement of judges."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from afm.configuration import Settings
from afm.evaluation.measures import Method
from afm.models.tool_calls import ToolCalls
from afm.rewards.judge import JudgeSettings
from afm.rewards.judge_endpoint import JudgeEndpoint


class ModelSettings(Settings):
    """Which model answers.

    Attributes:
        path: Folder of a model, or address of an OpenAI-compatible server; of several that serve it, a list, or with
            commas between.
        name: What the server calls it; what records call it.
        tokenizer: Folder of the tokenizer, for a server.
        context_tokens: Bound on prompt and response together, for a server that does not tell.
        threads: CPU threads of an in-process model.
        max_batch: Sequences an in-process model generates at once.
        chat: For a server that shows no token ids: the model is asked by chat completions and calls tools in the agent's ``tags``
            or by the endpoint's ``native`` tool calls. Token counts are then estimates.
        request: Laid over the fields of a chat request; ``null`` removes one, e.g. ``{max_tokens: null, max_completion_tokens: 4096}``.
    """

    path: str = Field(min_length=1)
    name: str | None = None
    tokenizer: str | None = None
    context_tokens: int | None = Field(default=None, ge=1)
    threads: int | None = Field(default=None, ge=1)
    max_batch: int = Field(default=64, ge=1)
    chat: ToolCalls | None = None
    request: dict[str, Any] = Field(default_factory=dict)

    @field_validator("path", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        several = isinstance(value, list) and all(isinstance(one, str) for one in value)
        return ",".join(value) if several else value

    @model_validator(mode="after")
    def _chats_with_a_server(self) -> Self:
        if self.request and self.chat is None:
            raise ValueError("no `request` without `chat`; only chat requests can be changed")
        if self.chat is not None and (
            self.folder is not None or self.tokenizer is not None or "," in self.path
        ):
            raise ValueError(
                "the address of one server and no tokenizer beside `chat`; a model whose folder or tokenizer is at hand "
                "is asked with token ids, without `chat`"
            )
        return self

    @property
    def folder(self) -> Path | None:
        """The model's folder, ``None`` for a server."""
        return None if "://" in self.path else Path(self.path).expanduser()


class TeamChoice(Settings):
    """Which team answers in place of a model.

    Attributes:
        file: A team's YAML, as of ``afm data distill --team``; ``scripted`` is the embedded team of the agent.
        changes: ``key=value`` for that file, e.g. ``budget.usd=5``.
    """

    file: str = Field(min_length=1)
    changes: tuple[str, ...] = ()


class SamplingSettings(Settings):
    """How the model samples; ``max_new_tokens`` bounds one generation, ``null`` leaves that to the limits."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_new_tokens: int | None = Field(default=None, ge=1)


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
