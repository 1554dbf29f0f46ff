"""Correctness of answers in words, by a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field, field_validator

from afm.configuration import merged
from afm.errors import ConfigError, DataError, RewardError
from afm.models.openai import base_url
from afm.rewards.base import Sample
from afm.rewards.exact_match import ExactMatch, normalised
from afm.rewards.gold import gold_answers
from afm.rewards.judge_client import JudgeClient
from afm.rewards.judge_prompt import SCHEMA, Case, Ruling, bystander, decoy, shown_rationale
from afm.rewards.judge_store import Ledger, VerdictCache
from afm.rewards.part import Part
from afm.settings import load_settings
from afm.trajectory import answers

NO_JUDGE = "no judge is configured: exact match"
"""Stands in the evidence of verdicts without a model behind them."""

_SHOWN = 120
_ADDRESS = "http://HOST or https://HOST, up to /v1"
_LIMITS = ("max_tokens", "max_completion_tokens")
_OURS = ("messages", "stream", "n")


class ReplyFormat(StrEnum):
    """How the server is asked to keep its reply to JSON."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    TEXT = "text"
    """Not at all, for servers that know no ``response_format``."""


class WithoutEndpoint(StrEnum):
    """What judges when no endpoint is configured."""

    EXACT_MATCH = "exact_match"
    ABSTAIN = "abstain"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BudgetSettings(_Strict):
    """See :class:`afm.rewards.judge_store.Ledger`."""

    calls: int | None = Field(default=None, ge=0)
    tokens: int | None = Field(default=None, ge=0)
    file: Path | None = None


class JudgeSettings(_Strict):
    """The ``judge`` part of a reward file. The key comes from GRM_API_KEY alone.

    Attributes:
        url: Of the endpoint; GRM_BASE_URL when ``None``.
        model: GRM_MODEL_NAME when ``None``.
        without_endpoint: What judges when neither names an endpoint.
        control: Judge an accepted answer again against a wrong gold answer, and score 0 when it is accepted again.
        max_answer_chars: Longer answers score 0: whoever lists everything has answered nothing.
        cache: File of verdicts, which processes may share.
        budget: When it is spent, samples have no score.
        request: Laid over the request's own fields; ``null`` removes one, e.g. ``{max_tokens: null}``.
        price_per_million_tokens: What the endpoint costs, for ``afm doctor`` to tell; nothing else reads it.
    """

    url: str | None = None
    model: str | None = None
    without_endpoint: WithoutEndpoint = WithoutEndpoint.EXACT_MATCH
    control: bool = True
    max_parallel: int = Field(default=16, ge=1)
    attempts: int = Field(default=5, ge=1)
    timeout_s: float = Field(default=60.0, gt=0)
    max_answer_chars: int = Field(default=1000, ge=1)
    reply_format: ReplyFormat = ReplyFormat.JSON_SCHEMA
    cache: Path | None = None
    budget: BudgetSettings = BudgetSettings()
    request: dict[str, Any] = Field(default_factory=dict)
    price_per_million_tokens: float | None = Field(default=None, ge=0)

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None and not _is_address(url):
            raise ValueError(_ADDRESS)
        return url

    @field_validator("request")
    @classmethod
    def _check_request(cls, request: dict[str, Any]) -> dict[str, Any]:
        given = {key: value for key, value in request.items() if value is not None}
        for key in _LIMITS:
            if type(given.get(key, 1)) is not int or given.get(key, 1) < 1:
                raise ValueError(f"{key} a whole number of at least 1 or null")
        for key in _OURS:
            if key in given:
                raise ValueError(f"no `{key}`: the judge sets it")
        return request


class ModelJudge:
    """1 when a model finds the final answer equal in meaning to a gold answer, else 0; no score when it fails.

    An answer that is a gold answer by exact match is right without asking. See :mod:`afm.rewards.judge_prompt` for
    what keeps the answer from steering the judge.

    Raises:
        ConfigError: The environment is wrong: no address, or a key that cannot be sent.
    """

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        environment = load_settings()
        url = settings.url or environment.grm_base_url
        self._model = settings.model or environment.grm_model_name
        self._exact = ExactMatch()
        self._client: JudgeClient | None = None
        if url is not None:
            if not _is_address(url):
                raise ConfigError(f"GRM_BASE_URL: got {url!r}, expected {_ADDRESS}")
            key = environment.grm_api_key
            budget = settings.budget
            self._client = JudgeClient(
                base_url(url.rstrip("/").removesuffix("/chat/completions")),
                request_fields(settings, self._model),
                Ledger(budget.calls, budget.tokens, budget.file),
                VerdictCache(settings.cache) if settings.cache else None,
                api_key=key.get_secret_value() if key else None,
                max_parallel=settings.max_parallel,
                attempts=settings.attempts,
                timeout_s=settings.timeout_s,
            )

    async def judge(self, sample: Sample) -> Part:
        """Have the agent's final answer judged."""
        try:
            accepted = gold_answers(sample.ground_truth)
        except DataError as error:
            return Part(None, error.message)
        given = answers(sample.segments, sample.spec)
        if not given:
            return Part(0.0, "the response has no final answer")
        if self._client is None:
            return await self._unjudged(sample)
        if len(given) == 1 and _is_exactly(given[0], accepted):
            return Part(1.0, f"{given[0][:_SHOWN]!r} is a gold answer")
        answer = " | ".join(given)
        longest = max(self._settings.max_answer_chars, *map(len, accepted))
        if len(answer) > longest:
            return Part(0.0, f"the final answer has {len(answer)} characters, more than {longest}")
        return await self._judged(self._client, Case(sample.question, accepted, answer))

    async def close(self) -> None:
        """Close connections and files."""
        if self._client is not None:
            await self._client.close()

    async def _unjudged(self, sample: Sample) -> Part:
        if self._settings.without_endpoint is WithoutEndpoint.ABSTAIN:
            return Part(None, "no judge: set GRM_BASE_URL, or `url` under `judge` in the reward YAML")
        part = await self._exact.judge(sample)
        return Part(part.score, f"{part.evidence} ({NO_JUDGE})")

    async def _judged(self, client: JudgeClient, case: Case) -> Part:
        try:
            ruling = await client.ruling(case)
            if ruling.judgement == "incorrect":
                return Part(0.0, self._said(ruling, case))
            if self._settings.control and await _accepts(client, decoy(case)):
                if await _accepts(client, bystander(case)):
                    return Part(None, f"judge {self._model} accepts any answer")
                wrong = decoy(case).accepted[0]
                return Part(
                    0.0, f"judge {self._model} takes this answer for {wrong!r} too: it steers the judge"
                )
        except RewardError as error:
            return Part(None, f"judge {self._model}: {error}")
        return Part(1.0, self._said(ruling, case))

    def _said(self, ruling: Ruling, case: Case) -> str:
        rationale = shown_rationale(ruling, case)
        return f"judge {self._model}: {ruling.judgement}" + (f": {rationale}" if rationale else "")


async def _accepts(client: JudgeClient, case: Case) -> bool:
    return (await client.ruling(case)).judgement == "correct"


def request_fields(settings: JudgeSettings, model: str) -> dict[str, Any]:
    """The request's fields beside its messages."""
    fields: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 512}
    match settings.reply_format:
        case ReplyFormat.JSON_SCHEMA:
            fields["response_format"] = {"type": "json_schema", "json_schema": SCHEMA}
        case ReplyFormat.JSON_OBJECT:
            fields["response_format"] = {"type": "json_object"}
        case ReplyFormat.TEXT:
            pass
    return {key: value for key, value in merged(fields, settings.request).items() if value is not None}


def _is_address(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host)


def _is_exactly(answer: str, accepted: tuple[str, ...]) -> bool:
    flat = normalised(answer)
    return bool(flat) and flat in {normalised(gold) for gold in accepted}
