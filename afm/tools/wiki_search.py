"""The wiki search tool: passages from wiki servers, or from any server with the protocol of Search-R1's."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from afm.configuration import validated
from afm.errors import ConfigError, ToolError
from afm.settings import load_settings
from afm.tools.base import ToolResult
from afm.tools.registry import ToolContext, ToolSchema

NOTHING_FOUND = "No passage was found."
_PATH = "/retrieve"
_MAX_QUERY_CHARS = 2_000
_MAX_REPLY_BYTES = 8 << 20
_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0


class WikiSearchSettings(BaseModel):
    """Settings of :class:`WikiSearchTool` in a tools file.

    Attributes:
        urls: Servers, with or without ``/retrieve``; asked in turn. By default ``WIKI_RAG_SERVER_URL``.
        topk: Passages for a query.
        max_passage_chars: Longer passages are cut at the end.
        timeout_s: For one request.
        tries: Requests before a failure counts, each to the next server.
        busy_s: How long to keep asking servers that are well but full.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    urls: tuple[str, ...] = ()
    topk: int = Field(default=3, ge=1, le=100)
    max_passage_chars: int = Field(default=2_000, ge=100)
    timeout_s: float = Field(default=30.0, gt=0)
    tries: int = Field(default=4, ge=1)
    busy_s: float = Field(default=120.0, ge=0)


class _Document(BaseModel):
    contents: str


class _Found(BaseModel):
    document: _Document


class _Reply(BaseModel):
    result: list[list[_Found]]


class _FailedError(Exception):
    """One request brought nothing; ``wait_s`` is set when the server is well but full, ``lasting`` when asking again is vain."""

    def __init__(self, reason: str, *, wait_s: float | None = None, lasting: bool = False) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        self.lasting = lasting


class WikiSearchTool:
    """Shows the passages closest to a query, the closest first.

    Args:
        urls: At least one address; the path ``/retrieve`` may be left out.
        token: Sent in the header ``Authorization`` and nowhere else.

    Raises:
        ConfigError: No address, or one that is not ``http://`` or ``https://``.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        settings: WikiSearchSettings | None = None,
        token: str | None = None,
        name: str = "wiki_search",
        schema: ToolSchema | None = None,
    ) -> None:
        if not urls:
            raise ConfigError("urls: got none, expected addresses such as http://127.0.0.1:8000/retrieve")
        self.name = name
        self.schema = schema
        self._urls = [_checked(url) for url in urls]
        self._settings = settings or WikiSearchSettings()
        self._token = token
        self._turn = itertools.count()
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], context: ToolContext) -> WikiSearchTool:
        """A tool with the settings of a tools file; see :class:`WikiSearchSettings`."""
        settings = validated(WikiSearchSettings, config, context.label, context.at)
        environment = load_settings()
        secret = environment.wiki_server_token
        token = secret.get_secret_value() if secret else None
        urls = settings.urls or (environment.wiki_rag_server_url,)
        try:
            return cls(
                urls, settings=settings, token=token, name=context.schema.function.name, schema=context.schema
            )
        except ConfigError as error:
            raise ConfigError(f"{context.label}: {context.at}: {error}") from None

    async def call(self, argument: str) -> ToolResult:
        """Search for the text of ``argument``."""
        query = " ".join(argument.encode("utf-8", "replace").decode().split())
        if not query:
            return ToolResult("Nothing was searched: the query is empty.", meta={"reason": "bad_argument"})
        if len(query) > _MAX_QUERY_CHARS:
            text = f"Nothing was searched: the query has {len(query)} characters, expected at most {_MAX_QUERY_CHARS}."
            return ToolResult(text, meta={"reason": "bad_argument"})
        began = time.monotonic()
        try:
            passages = await self._search(query)
        except ToolError as error:
            text = f"The {self.name} tool failed, nothing was searched: {error}"
            return ToolResult(text, ok=False, meta={"reason": "server", "error": str(error)})
        meta = {"hits": len(passages), "wall_s": round(time.monotonic() - began, 4)}
        shown = [
            _shown(number, text, self._settings.max_passage_chars) for number, text in enumerate(passages, 1)
        ]
        return ToolResult("\n\n".join(shown) or NOTHING_FOUND, meta=meta)

    async def close(self) -> None:
        """Close the connections of this event loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    async def _search(self, query: str) -> list[str]:
        began, failures, first = time.monotonic(), 0, next(self._turn)
        for attempt in itertools.count():
            url = self._urls[(first + attempt) % len(self._urls)]
            try:
                return await self._ask(url, query)
            except _FailedError as error:
                failures += error.wait_s is None
                late = time.monotonic() - began > self._settings.busy_s
                alone = error.lasting and len(self._urls) == 1
                if alone or late or failures >= self._settings.tries:
                    raise ToolError(f"{url}: {error}") from None
                longest = min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** min(attempt, 10))
                await asyncio.sleep((error.wait_s or 0.0) + random.uniform(longest / 2, longest))
        raise AssertionError("unreachable")

    async def _ask(self, url: str, query: str) -> list[str]:
        body = {"queries": [query], "topk": self._settings.topk, "return_scores": True}
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                status, headers, content = await self._posted(url, body)
        except TimeoutError:
            raise _FailedError(f"no answer within {self._settings.timeout_s:g} s") from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise _FailedError(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        if status == 429:
            raise _FailedError("busy", wait_s=_retry_after_s(headers))
        if status in (401, 403):
            raise _FailedError("refused the token; set WIKI_SERVER_TOKEN to the server's", lasting=True)
        if status != 200:
            text = content[:200].decode("utf-8", "replace")
            raise _FailedError(f"status {status}: {text}", lasting=400 <= status < 500 and status != 408)
        try:
            [found] = _Reply.model_validate_json(content).result
        except (ValidationError, ValueError):
            raise _FailedError(
                "its answer is not {result: [[{document: {contents}, score}]]}", lasting=True
            ) from None
        return [item.document.contents for item in found]

    async def _posted(self, url: str, body: Mapping[str, Any]) -> tuple[int, httpx.Headers, bytes]:
        content = bytearray()
        async with self._client().stream("POST", url, json=body) as response:
            async for piece in response.aiter_bytes():
                content += piece
                if len(content) > _MAX_REPLY_BYTES:
                    raise _FailedError(
                        f"its answer is longer than {_MAX_REPLY_BYTES >> 20} MiB", lasting=True
                    )
            return response.status_code, response.headers, bytes(content)

    def _client(self) -> httpx.AsyncClient:
        """The connections of this event loop. No proxy: wiki servers are machines of the same cluster."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {self._token}"} if self._token else {},
                timeout=self._settings.timeout_s,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                trust_env=False,
            )
        return self._clients[loop]


def _shown(number: int, contents: str, max_chars: int) -> str:
    """``[1] Title`` and the text below it."""
    title, _, text = contents.strip().partition("\n")
    whole = f"[{number}] {title.strip().strip(chr(34))}\n{text.strip()}".rstrip()
    return whole if len(whole) <= max_chars else whole[: max_chars - 4].rstrip() + " ..."


def _checked(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"urls: got {url!r}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"urls: got {url!r}, expected an address such as http://127.0.0.1:8000/retrieve")
    if parsed.userinfo:
        raise ConfigError("urls: an address holds a password; put the token into WIKI_SERVER_TOKEN instead")
    return url.rstrip("/").removesuffix(_PATH) + _PATH


def _retry_after_s(headers: httpx.Headers) -> float:
    try:
        return min(_LONGEST_PAUSE_S, max(0.0, float(headers.get("Retry-After", "0"))))
    except ValueError:
        return 0.0
