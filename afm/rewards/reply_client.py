"""Replies of a certain form from an OpenAI-compatible endpoint: paced, bounded, repeated when it fails, within a budget."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from afm.endpoints.chat import ChatEndpoint, ChatReply, UnusableReplyError, expected_tokens
from afm.endpoints.pace import Pace
from afm.endpoints.retry import TryAgainError, persistently
from afm.errors import EngineError, RewardError
from afm.rewards.judge_store import Ledger
from afm.rewards.meter import charge

ReplyT = TypeVar("ReplyT")


class ReplyClient:
    """Asks one model for replies that a reader understands.

    Args:
        url: Of the server, up to ``/v1``.
        request: The request's fields beside ``messages``: model, temperature, response format.
        api_key: Sent in the header ``Authorization`` and nowhere else.
        key_name: Where the key came from, for errors.
        max_parallel: Requests in flight.
        attempts: How often a request is sent when the server fails or the reply is not understood.
        timeout_s: For one request with its whole reply.
        requests_per_minute, tokens_per_minute: ``None`` for no limit.

    Raises:
        ConfigError: The key cannot be sent in a header.
    """

    def __init__(
        self,
        url: str,
        request: Mapping[str, Any],
        ledger: Ledger,
        *,
        api_key: str | None = None,
        key_name: str = "GRM_API_KEY",
        max_parallel: int = 16,
        attempts: int = 5,
        timeout_s: float = 60.0,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
    ) -> None:
        self._endpoint = ChatEndpoint(
            url, api_key=api_key, key_name=key_name, max_parallel=max_parallel, timeout_s=timeout_s
        )
        self._request = dict(request)
        self._ledger = ledger
        self._attempts = attempts
        limited = requests_per_minute is not None or tokens_per_minute is not None
        self._pace = Pace(requests_per_minute, tokens_per_minute) if limited else None

    @property
    def where(self) -> str:
        """The address that is asked."""
        return self._endpoint.where

    def body(self, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        """The whole request."""
        return self._request | {"messages": list(messages)}

    def asking(self, request: Mapping[str, Any]) -> ReplyClient:
        """The same connections, pace and budget with other fields of the request."""
        other = copy.copy(self)
        other._request = dict(request)
        return other

    async def reply(self, body: Mapping[str, Any], read: Callable[[str], ReplyT]) -> ReplyT:
        """What ``read`` makes of the model's reply; it raises ``ValueError`` where it makes nothing of it.

        Raises:
            RewardError: There is none: the server failed, replied with something else, or the budget is spent.
        """
        try:
            return await persistently(self._attempts, lambda: self._once(body, read))
        except TryAgainError as error:
            message = f"{self.where}: {error} (after {self._attempts} attempts)"
            raise RewardError(message) from None
        except EngineError as error:
            raise RewardError(str(error)) from None

    async def close(self) -> None:
        """Close the connections of this event loop, and the ledger."""
        await self._endpoint.close()
        self._ledger.close()

    async def _once(self, body: Mapping[str, Any], read: Callable[[str], ReplyT]) -> ReplyT:
        expected = sum(expected_tokens(body))
        used = 0
        async with self._endpoint.place() as client:
            sent = await self._pace.departure(expected) if self._pace is not None else None
            await self._ledger.reserve(expected)
            try:
                reply = await self._endpoint.ask(client, body)
                used = _used(reply, expected)
            except UnusableReplyError as error:  # it was paid for all the same
                used = _used(error.reply, expected)
                raise
            except TryAgainError as error:
                if self._pace is not None:
                    self._pace.close_for(error.wait_s)
                raise
            finally:
                charge(used)
                await self._ledger.settle(expected, used)
                if self._pace is not None and sent is not None:
                    self._pace.settle(sent, used)
        try:
            return read(reply.text)
        except ValueError as error:
            raise TryAgainError(f"no verdict: {error}") from None


def _used(reply: ChatReply, expected: int) -> int:
    return expected if reply.total_tokens is None else reply.total_tokens
