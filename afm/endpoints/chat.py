"""Chat completions from an OpenAI-compatible endpoint: bounded in time, size, number and rate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import httpx

from afm.endpoints.connections import Connections, without_key
from afm.endpoints.retry import RETRIED_STATUS, TryAgainError, retry_after_s
from afm.errors import RefusedError
from afm.trajectory.observation import whole_characters

_CONNECT_TIMEOUT_S = 10.0
_LONGEST_REPLY = 1 << 20
_MOST_TOKENS = 10_000_000  # of one request; more is a mistake of the server's
_CHARS_PER_TOKEN = 3
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class ChatReply:
    """One complete reply.

    Attributes:
        text: What the model said.
        prompt_tokens, completion_tokens: As the server reports them; ``None`` when it does not.
        total_tokens: The same; some servers report nothing else.
        calls: Name and arguments of each tool call, where the request offered tools.
    """

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    calls: tuple[tuple[str, str], ...] = ()


class UnusableReplyError(TryAgainError):
    """A reply came and cost something, but it is not complete or not an assistant's.

    Attributes:
        reply: With the tokens that the server counted.
        finish: The finish reason that the server gave.
    """

    def __init__(self, reason: str, reply: ChatReply, finish: str = "") -> None:
        super().__init__(reason)
        self.reply = reply
        self.finish = finish


class ChatEndpoint:
    """One server's ``/chat/completions``. It may be used in several event loops.

    Args:
        url: Of the server, up to ``/v1``.
        api_key: Sent in the header ``Authorization`` and nowhere else.
        key_name: Where the key came from, for errors.
        max_parallel: Requests in flight.
        timeout_s: For one request with its whole reply.

    Raises:
        ConfigError: The key cannot be sent in a header.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        key_name: str = "the API key",
        max_parallel: int = 16,
        timeout_s: float = 60.0,
    ) -> None:
        self.where = f"{url}/chat/completions"
        self._api_key = api_key
        self._timeout_s = timeout_s
        self._connections = Connections(
            max_parallel,
            key=api_key,
            key_name=key_name,
            headers={"Accept-Encoding": "identity"},  # a little compressed text can become endless
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S)),
        )

    def place(self) -> AbstractAsyncContextManager[httpx.AsyncClient]:
        """Wait for one of the ``max_parallel`` places; :meth:`ask` needs the client that it gives."""
        return self._connections.place()

    async def ask(self, client: httpx.AsyncClient, body: Mapping[str, Any]) -> ChatReply:
        """Send one request, once.

        Raises:
            TryAgainError: It failed in a way that may pass by itself, or the reply is incomplete.
            RefusedError: The server refused.
        """
        return read_reply(await self._posted(client, body), with_tools="tools" in body)

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self._connections.close()

    async def _posted(self, client: httpx.AsyncClient, body: Mapping[str, Any]) -> bytes:
        """The body of the reply."""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                client.stream("POST", self.where, json=body) as response,
            ):
                data = await _read(response)
        except TimeoutError:
            raise TryAgainError(f"ReadTimeout: no whole reply within {self._timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise TryAgainError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        if response.status_code in RETRIED_STATUS:
            raise TryAgainError(self._failure(response.status_code, data), retry_after_s(response.headers))
        if not response.is_success:
            raise RefusedError(f"{self.where}: {self._failure(response.status_code, data)}")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise TryAgainError("the reply is compressed, though the request forbids it")
        return data

    def _failure(self, status: int, data: bytes) -> str:
        text = without_key(" ".join(data.decode("utf-8", "replace").split()), self._api_key)
        return f"status {status}: {text[:_SHOWN] or 'no text'}"


def expected_tokens(body: Mapping[str, Any]) -> tuple[int, int]:
    """About how many tokens a request will take, rather too many: of its prompt, and of its reply."""
    prompt = sum(len(message["content"]) for message in body["messages"]) // _CHARS_PER_TOKEN
    return prompt, int(body.get("max_tokens") or body.get("max_completion_tokens") or 0)


def read_reply(body: bytes, *, with_tools: bool = False) -> ChatReply:
    """The text of a complete reply, its tool calls where tools were offered, and the tokens used if the server reports them.

    Raises:
        TryAgainError: There is no complete reply of an assistant.
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
        calls = tuple(_call(item) for item in message.get("tool_calls") or ()) if with_tools else ()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TryAgainError("the answer is no chat completion") from None
    reply = ChatReply(
        whole_characters(text) if isinstance(text, str) else "", prompt, completion, total, calls
    )
    if role != "assistant":
        raise UnusableReplyError(f"the reply is of the role {str(role)[:40]!r}, expected 'assistant'", reply)
    if calls and finish in ("tool_calls", "stop", None):
        return reply
    if not isinstance(text, str) or finish not in ("stop", None):
        reason = f"the reply is incomplete (finish reason {str(finish)[:40]!r})"
        raise UnusableReplyError(reason, reply, str(finish)[:40])
    return reply


def _call(item: Mapping[str, Any]) -> tuple[str, str]:
    function = item["function"]
    return str(function["name"]), whole_characters(str(function["arguments"]))


def _tokens(count: Any) -> int | None:
    return count if isinstance(count, int) and 0 <= count <= _MOST_TOKENS else None


async def _read(response: httpx.Response) -> bytes:
    data = bytearray()
    async for chunk in response.aiter_raw():
        data += chunk
        if len(data) > _LONGEST_REPLY:
            raise TryAgainError("the reply is too long")
    return bytes(data)
