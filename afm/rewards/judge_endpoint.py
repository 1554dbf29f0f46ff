"""The server of a judge: its address, the request for JSON replies, and the tokens that they cost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from pydantic import Field, field_validator

from afm.configuration import merged
from afm.endpoints.budget import Budget, BudgetSettings
from afm.endpoints.chat import ChatEndpoint, ChatReply, EndpointSettings
from afm.endpoints.connections import address_fault, base_url
from afm.endpoints.pace import TryAgainError
from afm.errors import ConfigError, EngineError, RewardError, without_password
from afm.settings import load_settings

_LIMITS = ("max_tokens", "max_completion_tokens")
_OURS = ("messages", "stream", "n")

ReplyT = TypeVar("ReplyT")


class ReplyFormat(StrEnum):
    """How a request asks the server for a JSON reply."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    TEXT = "text"
    """No request field, for servers without ``response_format``."""


@dataclass(frozen=True, slots=True)
class JudgePlace:
    """The address of requests: ``url`` up to ``/v1``, or ``None`` if not configured."""

    url: str | None
    model: str
    api_key: str | None


class JudgeEndpoint(EndpointSettings):
    """The server of a judge. Without ``url`` it is GRM_BASE_URL."""

    model: str | None = None
    """As the server calls it; ``GRM_MODEL_NAME`` if not set."""
    key_variable: str = Field(default="GRM_API_KEY", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """The environment variable that holds the key; the key itself is never in a file."""
    max_parallel: int = Field(default=16, ge=1)
    timeout_s: float = Field(default=60.0, gt=0)
    reply_format: ReplyFormat = ReplyFormat.JSON_SCHEMA
    """``json_schema``, ``json_object``, or ``text`` for servers without ``response_format``."""
    budget: BudgetSettings = BudgetSettings()
    """``calls``, ``tokens``, and a ``file`` that processes share and that outlives restarts; without one
    each process counts alone. A call that does not fit waits for calls in flight, which may cost less
    than they reserve. When the budget is spent, there are no more verdicts."""
    request: dict[str, Any] = Field(default_factory=dict)
    """Merged into the fields of the request, e.g. ``{max_tokens: null, max_completion_tokens: 900, seed: 1}``.
    ``null`` removes a field. Not ``messages``, ``stream``, ``n``."""

    @field_validator("budget")
    @classmethod
    def _check_budget(cls, budget: BudgetSettings) -> BudgetSettings:
        if budget.usd is not None:
            raise ValueError("no `usd`: the budget of a judge is in calls and tokens")
        return budget

    @field_validator("request")
    @classmethod
    def _check_request(cls, request: dict[str, Any]) -> dict[str, Any]:
        fields = {key: value for key, value in request.items() if value is not None}
        for key in _LIMITS:
            if type(fields.get(key, 1)) is not int or fields.get(key, 1) < 1:
                raise ValueError(f"{key} a whole number of at least 1 or null")
        for key in _OURS:
            if key in fields:
                raise ValueError(f"no `{key}`: the judge sets it")
        return request

    def place(self) -> JudgePlace:
        """Return the address of requests, from the settings or the environment.

        Raises:
            ConfigError: GRM_BASE_URL is not a valid address.
        """
        environment = load_settings()
        url = self.url or environment.grm_base_url
        model = self.model or environment.grm_model_name
        if url is None:
            return JudgePlace(None, model, None)
        if fault := address_fault(url):
            raise ConfigError(f"GRM_BASE_URL: got {without_password(url)!r}, expected {fault}")
        return JudgePlace(base_url(url), model, self.key())

    def client(self, place: JudgePlace, schema: Mapping[str, Any]) -> ReplyClient:
        """Return a client that asks for replies that match ``schema``.

        Raises:
            ConfigError: ``place`` has no url, or the key cannot be sent in a header.
        """
        if place.url is None:
            raise ConfigError("no judge: set GRM_BASE_URL, or `url` among the judge's settings")
        return ReplyClient(
            ChatEndpoint(self, place.url, Budget(self.budget, "raise `budget` among the judge's settings")),
            self.request_fields(place.model, schema),
        )

    def request_fields(self, model: str, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a request except its messages."""
        fields: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 512}
        match self.reply_format:
            case ReplyFormat.JSON_SCHEMA:
                fields["response_format"] = {"type": "json_schema", "json_schema": dict(schema)}
            case ReplyFormat.JSON_OBJECT:
                fields["response_format"] = {"type": "json_object"}
            case ReplyFormat.TEXT:
                pass
        return {key: value for key, value in merged(fields, self.request).items() if value is not None}


class ReplyClient:
    """Asks a judge model for replies. ``request`` holds all fields except ``messages``."""

    def __init__(self, endpoint: ChatEndpoint, request: Mapping[str, Any]) -> None:
        self._endpoint = endpoint
        self._request = dict(request)

    @property
    def where(self) -> str:
        """Return the address of the server."""
        return self._endpoint.where

    def body(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        """Return the whole request."""
        return self._request | {"messages": list(messages)}

    def asking(self, request: Mapping[str, Any]) -> ReplyClient:
        """Return a client with other request fields and the same connections, pace and budget."""
        other = copy.copy(self)
        other._request = dict(request)
        return other

    async def reply(self, body: Mapping[str, Any], read: Callable[[str], ReplyT]) -> ReplyT:
        """Return the model's reply as ``read`` parses it; ``read`` raises ``ValueError`` for an unusable reply.

        Raises:
            RewardError: The server failed, the reply is unusable, or the budget is spent.
        """

        def verdict(reply: ChatReply) -> ReplyT:
            try:
                return read(reply.text)
            except ValueError as error:
                raise TryAgainError(f"no verdict: {error}") from None

        try:
            return await self._endpoint.ask(body, verdict, on_call=lambda report: charge(report.tokens))
        except EngineError as error:
            raise RewardError(str(error)) from None

    async def close(self) -> None:
        """Close the connections of this event loop, and the budget's file."""
        await self._endpoint.close()


@dataclass(slots=True)
class JudgeMeter:
    """A count of tokens, prompts and replies together."""

    tokens: int = 0


_RUNNING: ContextVar[JudgeMeter | None] = ContextVar("judge_meter", default=None)


@contextmanager
def judge_meter() -> Iterator[JudgeMeter]:
    """Count the judge tokens of the block, including those of tasks that begin in it.

    A request that several tasks wait for counts in the block that sent it. A cached verdict costs nothing.
    """
    meter = JudgeMeter()
    before = _RUNNING.set(meter)
    try:
        yield meter
    finally:
        _RUNNING.reset(before)


def charge(tokens: int) -> None:
    """Add to the running count, if any."""
    meter = _RUNNING.get()
    if meter is not None:
        meter.tokens += tokens
