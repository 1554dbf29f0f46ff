"""Chat completions from an OpenAI-compatible endpoint: paced, bounded, repeated when they fail, and within a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic import Field, field_validator

from afm.configuration import Settings
from afm.endpoints.budget import Budget, BudgetSettings, Spent, TokenPrice
from afm.endpoints.connections import (
    CONNECT_TIMEOUT_S,
    Connections,
    address_fault,
    base_url,
    environment_key,
    post,
)
from afm.endpoints.pace import Pace, TryAgainError, persistently
from afm.endpoints.replies import ChatReply, UnusableReplyError, expected_tokens, read_reply
from afm.errors import EngineError, RefusedError

MOST_PARALLEL = 10_000
"""Requests in flight that one process can hold."""
_LONGEST_REPLY = 1 << 20

ResultT = TypeVar("ResultT")


class EndpointSettings(Settings):
    """One OpenAI-compatible server, and how much of it may be used. The key comes from the environment alone."""

    url: str | None = None
    """Address of the server, with or without ``/v1``. If not set, judges take ``GRM_BASE_URL`` and teams
    ``TEACHER_BASE_URL``."""
    key_variable: str = Field(default="AFM_MODEL_API_KEY", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """The environment variable that holds the key."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """What the endpoint allows. A pause that it asks for holds for all requests."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """The same for tokens, those of all tasks together."""
    max_parallel: int = Field(default=64, ge=1, le=MOST_PARALLEL)
    """Requests in flight."""
    attempts: int = Field(default=5, ge=1, le=100)
    """How often a request is sent when the server fails or its reply is useless, with pauses and jitter.
    ``Retry-After`` is honoured."""
    timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """Seconds for one request with its whole reply."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None and (fault := address_fault(url)):
            raise ValueError(fault)
        return url

    def key(self) -> str | None:
        """What ``key_variable`` holds now."""
        return environment_key(self.key_variable)


@dataclass(frozen=True, slots=True)
class CallReport:
    """One request and what became of it.

    Attributes:
        reply: ``None`` when the server gave none.
        fault: What is wrong with the reply or the server, empty when nothing is.
        seconds: Until the whole reply was there.
        prompt_tokens, completion_tokens, usd: What it cost, estimated where the server does not say.
    """

    reply: ChatReply | None
    fault: str
    seconds: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0

    @property
    def tokens(self) -> int:
        """Of prompt and reply together."""
        return self.prompt_tokens + self.completion_tokens


class ChatEndpoint:
    """One server's ``/chat/completions``. It may be used in several event loops.

    Args:
        url: Of the server; by default the settings'.
        budget: What all calls may cost together; several endpoints may share it.

    Raises:
        ConfigError: The key cannot be sent in a header.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        url: str | None = None,
        budget: Budget | None = None,
    ) -> None:
        self.where = f"{base_url(url or settings.url or '')}/chat/completions"
        self._settings = settings
        self._api_key = settings.key()
        self._pace = Pace(settings.requests_per_minute, settings.tokens_per_minute)
        self._budget = budget or Budget(BudgetSettings())
        timeout_s = settings.timeout_s
        self._connections = Connections(
            settings.max_parallel,
            key=self._api_key,
            key_name=settings.key_variable,
            headers={"Accept-Encoding": "identity"},  # a little compressed text can become endless
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
        )

    async def ask(
        self,
        body: Mapping[str, Any],
        read: Callable[[ChatReply], ResultT],
        *,
        finishes: Collection[str] = ("stop",),
        price: TokenPrice | None = None,
        log: Spent | None = None,
        on_call: Callable[[CallReport], None] | None = None,
    ) -> ResultT:
        """What ``read`` makes of the reply; the request is sent again when it raises ``TryAgainError``.

        Args:
            finishes: Finish reasons at which a reply is taken as it is.
            price: For a budget in money.
            log: What counts for the budget in place of its own count; ``on_call`` brings it up to date.
            on_call: Called after each request that was sent.

        Raises:
            RefusedError: The server refused, or gave no reply that can be used.
            BudgetSpentError: The call does not fit into what is left of the budget.
            EngineError: The server failed each time.
            ConfigError: The request alone is more than a minute allows.
        """

        async def once() -> ResultT:
            return read(await self._once(body, finishes, price, log, on_call))

        try:
            return await persistently(self._settings.attempts, once)
        except TryAgainError as error:
            useless = isinstance(error, UnusableReplyError)
            message = f"{self.where}: {error} (after {self._settings.attempts} attempts)"
            raise (RefusedError if useless else EngineError)(message) from error.__cause__

    async def close(self) -> None:
        """Close the connections of this event loop, and the budget's file."""
        await self._connections.close()
        self._budget.close()

    async def _once(
        self,
        body: Mapping[str, Any],
        finishes: Collection[str],
        price: TokenPrice | None,
        log: Spent | None,
        on_call: Callable[[CallReport], None] | None,
    ) -> ChatReply:
        prompt, completion = expected_tokens(body)
        most = Spent(1, prompt + completion, price.usd(prompt, completion) if price else 0.0)
        async with self._connections.place() as client, self._budget.reserved(most, log) as spent:
            departure = await self._pace.departure(most.tokens)
            spent.calls = 1
            report, error = await self._send(client, body, finishes, price)
            spent.tokens = report.tokens
            spent.usd = report.usd
            self._pace.settle(departure, spent.tokens)
            if on_call is not None:
                on_call(report)
        if error is not None:
            raise error
        assert report.reply is not None
        return report.reply

    async def _send(
        self,
        client: httpx.AsyncClient,
        body: Mapping[str, Any],
        finishes: Collection[str],
        price: TokenPrice | None,
    ) -> tuple[CallReport, Exception | None]:
        """One request, with the error that it ends in."""
        started = time.perf_counter()
        timeout_s = self._settings.timeout_s
        reply: ChatReply | None = None
        error: Exception | None = None
        try:
            data = await post(
                client, self.where, body, timeout_s=timeout_s, max_bytes=_LONGEST_REPLY, key=self._api_key
            )
            reply = read_reply(data, with_tools="tools" in body, finishes=finishes)
        except UnusableReplyError as unusable:
            reply, error = unusable.reply, unusable
        except (TryAgainError, RefusedError) as failure:
            error = failure
            self._pace.close_for(getattr(failure, "wait_s", 0.0))
        prompt, completion = reply.usage(body) if reply is not None else (0, 0)
        usd = price.usd(prompt, completion) if price else 0.0
        seconds = round(time.perf_counter() - started, 6)
        return CallReport(reply, str(error or ""), seconds, prompt, completion, usd), error
