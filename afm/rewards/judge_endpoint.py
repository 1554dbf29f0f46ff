"""The server behind a judge: where it is, how much of it may be used, and how it is asked for JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from afm.configuration import Settings, merged
from afm.endpoints.connections import base_url, is_address
from afm.errors import ConfigError
from afm.rewards.judge_store import Ledger
from afm.rewards.reply_client import ReplyClient
from afm.settings import load_settings

_ADDRESS = "http://HOST or https://HOST, up to /v1"
_LIMITS = ("max_tokens", "max_completion_tokens")
_OURS = ("messages", "stream", "n")
_KEY = "GRM_API_KEY"


class ReplyFormat(StrEnum):
    """How the server is asked to keep its reply to JSON."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    TEXT = "text"
    """Not at all, for servers that know no ``response_format``."""


class BudgetSettings(Settings):
    """See :class:`afm.rewards.judge_store.Ledger`."""

    calls: int | None = Field(default=None, ge=0)
    tokens: int | None = Field(default=None, ge=0)
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where requests go: ``url`` up to ``/v1``, ``None`` when none is configured."""

    url: str | None
    model: str
    api_key: str | None


class JudgeEndpoint(Settings):
    """One OpenAI-compatible server. The key comes from the environment alone.

    Attributes:
        url: GRM_BASE_URL when ``None``.
        model: GRM_MODEL_NAME when ``None``.
        key_variable: The environment variable that holds the key.
        max_parallel: Requests in flight.
        requests_per_minute, tokens_per_minute: ``None`` for no limit.
        attempts: How often a request is sent when the server fails or replies with something else.
        timeout_s: For one request with its whole reply.
        budget: When it is spent, there are no more verdicts.
        request: Laid over the request's own fields; ``null`` removes one, e.g. ``{max_tokens: null}``.
    """

    url: str | None = None
    model: str | None = None
    key_variable: str = Field(default=_KEY, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    max_parallel: int = Field(default=16, ge=1)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    attempts: int = Field(default=5, ge=1)
    timeout_s: float = Field(default=60.0, gt=0)
    reply_format: ReplyFormat = ReplyFormat.JSON_SCHEMA
    budget: BudgetSettings = BudgetSettings()
    request: dict[str, Any] = Field(default_factory=dict)

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None and not is_address(url):
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

    def place(self) -> Place:
        """Where requests go, with what the environment adds.

        Raises:
            ConfigError: GRM_BASE_URL is no address.
        """
        environment = load_settings()
        url = self.url or environment.grm_base_url
        model = self.model or environment.grm_model_name
        if url is None:
            return Place(None, model, None)
        if not is_address(url):
            raise ConfigError(f"GRM_BASE_URL: got {url!r}, expected {_ADDRESS}")
        key = os.environ.get(self.key_variable) or None
        if self.key_variable == _KEY:
            secret = environment.grm_api_key
            key = secret.get_secret_value() if secret else None
        return Place(base_url(url), model, key)

    def client(self, place: Place, schema: Mapping[str, Any]) -> ReplyClient:
        """A client that asks for replies of a ``json_schema``; ``place`` has a url.

        Raises:
            ConfigError: There is no url, or the key cannot be sent in a header.
        """
        if place.url is None:
            raise ConfigError("no judge: set GRM_BASE_URL, or `url` among the judge's settings")
        return ReplyClient(
            place.url,
            self.request_fields(place.model, schema),
            Ledger(self.budget.calls, self.budget.tokens, self.budget.file),
            api_key=place.api_key,
            key_name=self.key_variable,
            max_parallel=self.max_parallel,
            attempts=self.attempts,
            timeout_s=self.timeout_s,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
        )

    def request_fields(self, model: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The request's fields beside its messages."""
        fields: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 512}
        match self.reply_format:
            case ReplyFormat.JSON_SCHEMA:
                fields["response_format"] = {"type": "json_schema", "json_schema": dict(schema)}
            case ReplyFormat.JSON_OBJECT:
                fields["response_format"] = {"type": "json_object"}
            case ReplyFormat.TEXT:
                pass
        return {key: value for key, value in merged(fields, self.request).items() if value is not None}
