"""Chat completions from an OpenAI-compatible endpoint, with pace, bounds, retries and a budget.

The second half of the module reads replies: completeness, token usage, and the text without its reasoning.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
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
from afm.errors import EngineError, RefusedError
from afm.terminal import plural
from afm.trajectory.observation import whole_characters

MOST_PARALLEL = 10_000
"""Maximum number of requests in flight per process."""
_LONGEST_REPLY = 1 << 20
CHARACTERS_PER_TOKEN = 3
"""A low value, so that estimates of tokens are rather too large."""
_MOST_TOKENS = 10_000_000  # of one request; a larger number is a fault of the server
_SHOWN = 40

_TAG = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_OBJECT = re.compile(r'\{\s*"')
_MOST_BROKEN = 200
_DECODER = json.JSONDecoder(strict=False)

ResultT = TypeVar("ResultT")


class EndpointSettings(Settings):
    """One OpenAI-compatible server and the limits of its use. The key always comes from the environment."""

    url: str | None = None
    """Address of the server, with or without ``/v1``. If not set, judges take ``GRM_BASE_URL`` and teams
    ``TEACHER_BASE_URL``."""
    key_variable: str = Field(default="AFM_MODEL_API_KEY", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the environment variable with the key."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Limit of the endpoint. A pause that it requests applies to all requests."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Token limit of the endpoint, for all tasks together."""
    max_parallel: int = Field(default=64, ge=1, le=MOST_PARALLEL)
    """Maximum number of requests in flight."""
    attempts: int = Field(default=5, ge=1, le=100)
    """Maximum number of attempts if the server fails or its reply is unusable, with pauses and jitter. ``Retry-After`` is
    respected."""
    timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """Seconds for one request with its complete reply."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None and (fault := address_fault(url)):
            raise ValueError(fault)
        return url

    def key(self) -> str | None:
        """Return the current value of ``key_variable``."""
        return environment_key(self.key_variable)


@dataclass(frozen=True, slots=True)
class CallReport:
    """One request and its outcome.

    Attributes:
        reply: ``None`` if the server gave no reply.
        fault: What is wrong with the reply or the server. Empty if nothing is.
        seconds: Time until the complete reply.
        prompt_tokens, completion_tokens, usd: Usage and cost. Estimated if the server does not report usage.
    """

    reply: ChatReply | None
    fault: str
    seconds: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0

    @property
    def tokens(self) -> int:
        """Number of tokens of prompt and reply."""
        return self.prompt_tokens + self.completion_tokens


class ChatEndpoint:
    """One server's ``/chat/completions``. It may be used in several event loops.

    Args:
        url: Address of the server. The default is the one in the settings.
        budget: Limits the cost of all calls. Several endpoints may share it.

    Raises:
        ConfigError: The key is not valid in a header.
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
            headers={"Accept-Encoding": "identity"},  # a small compressed body can expand without bound
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
        """Return the result of ``read`` on the reply. The request is repeated if it raises ``TryAgainError``.

        Args:
            finishes: Finish reasons of a complete reply.
            price: Price for a budget in US dollars.
            log: Replaces the budget's own count. ``on_call`` keeps it up to date.
            on_call: Called after each request that was sent.

        Raises:
            RefusedError: The server rejected the request, or gave no usable reply.
            BudgetSpentError: The call does not fit into the rest of the budget.
            EngineError: Every attempt failed.
            ConfigError: The request exceeds the limit of a whole minute.
        """

        async def once() -> ResultT:
            return read(await self._once(body, finishes, price, log, on_call))

        try:
            return await persistently(self._settings.attempts, once)
        except TryAgainError as error:
            useless = isinstance(error, UnusableReplyError)
            message = f"{self.where}: {error} (after {plural(self._settings.attempts, 'attempt')})"
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
        """Send one request. Returns its report and its error, if any."""
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


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One reply.

    Attributes:
        text: Text of the reply.
        prompt_tokens, completion_tokens: Reported usage. ``None`` if the server reports none.
        total_tokens: Reported total. Some servers report only this.
        calls: Name and arguments of each tool call, if the request offered tools.
        finish: Finish reason: ``stop``, or the server's own value.
    """

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    calls: tuple[tuple[str, str], ...] = ()
    finish: str = "stop"

    @property
    def metered(self) -> bool:
        """Whether the server reported the usage of prompt and reply."""
        return None not in (self.prompt_tokens, self.completion_tokens)

    def usage(self, body: Mapping[str, Any]) -> tuple[int, int]:
        """Return the tokens of prompt and reply. Without reported usage they are estimated from ``body`` and text."""
        prompt = expected_tokens(body)[0] if self.prompt_tokens is None else self.prompt_tokens
        if self.completion_tokens is not None:
            return prompt, self.completion_tokens
        if self.total_tokens is not None:
            return min(prompt, self.total_tokens), max(0, self.total_tokens - prompt)
        return prompt, len(self.text) // CHARACTERS_PER_TOKEN + 1


class UnusableReplyError(TryAgainError):
    """A ``reply`` arrived and has a cost, but it is incomplete or not from the assistant."""

    def __init__(self, reason: str, reply: ChatReply) -> None:
        super().__init__(reason)
        self.reply = reply


def expected_tokens(body: Mapping[str, Any]) -> tuple[int, int]:
    """Estimate the tokens of a request's prompt and reply. The estimate is rather too large."""
    prompt = sum(len(message["content"]) for message in body["messages"]) // CHARACTERS_PER_TOKEN
    return prompt, int(body.get("max_tokens") or body.get("max_completion_tokens") or 0)


def read_reply(body: bytes, *, with_tools: bool = False, finishes: Collection[str] = ("stop",)) -> ChatReply:
    """Read the reply in a server's answer.

    Args:
        with_tools: Whether the request offered tools, so that tool calls may replace text.
        finishes: Finish reasons of a complete reply.

    Raises:
        TryAgainError: The answer is not a chat completion.
        UnusableReplyError: The reply ended for another reason, or is not from the assistant.
    """
    try:
        data = json.loads(body)
        [choice] = data["choices"]
        message, finish = choice["message"], choice.get("finish_reason")
        text = message.get("content") if with_tools else message["content"]
        role = message.get("role", "assistant")
        usage = data.get("usage") or {}
        prompt, completion, total = (
            _tokens(usage.get(f"{kind}_tokens")) for kind in ("prompt", "completion", "total")
        )
        calls = tuple(map(_call, message.get("tool_calls") or ())) if with_tools else ()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TryAgainError("the answer is not a chat completion") from None
    if finish is None or (calls and finish == "tool_calls"):
        finish = "stop"
    whole = whole_characters(text) if isinstance(text, str) else ""
    reply = ChatReply(whole, prompt, completion, total, calls, str(finish))
    if role != "assistant":
        raise UnusableReplyError(
            f"the reply is of the role {str(role)[:_SHOWN]!r}, expected 'assistant'", reply
        )
    missing = not isinstance(text, str) and not calls and reply.finish == "stop"
    if missing or reply.finish not in finishes:
        reason = f"the reply is incomplete (finish reason {choice.get('finish_reason')!r:.{_SHOWN}})"
        raise UnusableReplyError(reason, reply)
    return reply


def _call(item: Mapping[str, Any]) -> tuple[str, str]:
    function = item["function"]
    return str(function["name"]), whole_characters(str(function["arguments"]))


def _tokens(count: Any) -> int | None:
    return count if isinstance(count, int) and 0 <= count <= _MOST_TOKENS else None


class UnfinishedReasoningError(ValueError):
    """A text ends within its reasoning, so it contains no reply."""


def without_reasoning(text: str) -> str:
    """Return ``text`` without ``<think>...</think>``, and without everything before an unopened ``</think>``.

    Tags inside a complete JSON object are part of its text. ``<thinking>`` counts as well.

    Raises:
        UnfinishedReasoningError: A ``<think>`` is never closed.
    """
    quoted = _spans(text) if _TAG.search(text) else []
    kept: list[str] = []
    begin, opened = 0, False
    for tag in _TAG.finditer(text):
        if any(start < tag.start() < end for start, end in quoted):
            continue
        if not tag[1]:
            if not opened:
                kept.append(text[begin : tag.start()])
            opened = True
            continue
        if not opened:
            kept.clear()
        begin, opened = tag.end(), False
    if opened:
        raise UnfinishedReasoningError("its reasoning is not finished, so it contains no reply")
    return "".join((*kept, text[begin:]))


def objects_in(text: str) -> Iterator[dict[str, Any] | None]:
    """Yield the JSON objects in ``text`` that have keys, in order. ``None`` stands for a broken or incomplete object.

    Nested objects belong to the outer one, even if it is broken after them. Anything between objects (words, a fence) is
    skipped.
    """
    for data, _, _ in _scanned(text, inside_broken=False):
        yield data


def _spans(text: str) -> list[tuple[int, int]]:
    return [(start, end) for data, start, end in _scanned(text, inside_broken=True) if data is not None]


def _scanned(text: str, *, inside_broken: bool) -> Iterator[tuple[dict[str, Any] | None, int, int]]:
    """Yield objects with their start and end. ``inside_broken`` includes objects inside a broken one."""
    place = broken = 0
    while broken < _MOST_BROKEN and (match := _OBJECT.search(text, place)):
        data, start = None, match.start()
        try:
            data, place = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            place, broken = start + 1, broken + 1
            if isinstance(error, json.JSONDecodeError) and not inside_broken:
                place = max(place, error.pos)
        yield data, start, place
