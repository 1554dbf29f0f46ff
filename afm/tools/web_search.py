"""The web search tool: results from a web search server, or any server with Serper's protocol and no key."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from afm.configuration import validated
from afm.errors import ConfigError
from afm.settings import load_settings
from afm.tools.base import ToolResult
from afm.tools.registry import ToolContext, ToolSchema
from afm.tools.web_client import WebClient, WebServerError

NOTHING_FOUND = "No page was found. Try other or fewer words."
_PATH = "/search"


class WebSearchSettings(BaseModel):
    """Settings of :class:`WebSearchTool` in a tools file.

    Attributes:
        urls: Servers, with or without ``/search``; asked in turn. By default ``SERVER_HOST`` and ``WEBSEARCH_PORT``.
        results: Of one search.
        run: Name of the run whose budget pays, when the server has one.
        timeout_s: For one request; longer than the server's own patience with its provider.
        tries: Requests before a failure counts, each to the next server.
        busy_s: How long to keep asking servers that are well but full.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    urls: tuple[str, ...] = ()
    results: int = Field(default=10, ge=1, le=100)
    run: str = ""
    timeout_s: float = Field(default=70.0, gt=0)
    tries: int = Field(default=3, ge=1)
    busy_s: float = Field(default=120.0, ge=0)


class _Hit(BaseModel):
    title: str = ""
    link: str
    snippet: str = ""


class _Reply(BaseModel):
    organic: list[_Hit]


class WebSearchTool:
    """Shows titles, addresses and short extracts of the pages that fit a query.

    Args:
        urls: At least one address; the path ``/search`` may be left out.
        token: Sent in the header ``Authorization`` and nowhere else.

    Raises:
        ConfigError: No address, or one that is not ``http://`` or ``https://``.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        settings: WebSearchSettings | None = None,
        token: str | None = None,
        name: str = "web_search",
        schema: ToolSchema | None = None,
    ) -> None:
        self.name = name
        self.schema = schema
        self._settings = settings or WebSearchSettings()
        self._client = WebClient(
            urls,
            _PATH,
            token=token,
            timeout_s=self._settings.timeout_s,
            tries=self._settings.tries,
            busy_s=self._settings.busy_s,
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], context: ToolContext) -> WebSearchTool:
        """A tool with the settings of a tools file; see :class:`WebSearchSettings`."""
        settings = validated(WebSearchSettings, config, context.label, context.at)
        environment = load_settings()
        secret = environment.web_server_token
        urls = settings.urls or (f"http://{environment.server_host}:{environment.websearch_port}",)
        try:
            return cls(
                urls,
                settings=settings,
                token=secret.get_secret_value() if secret else None,
                name=context.schema.function.name,
                schema=context.schema,
            )
        except ConfigError as error:
            raise ConfigError(f"{context.label}: {context.at}: {error}") from None

    async def call(self, argument: str) -> ToolResult:
        """Search for the text of ``argument``."""
        query = " ".join(argument.split())
        if not query:
            return ToolResult("Nothing was searched: the query is empty.", meta={"reason": "bad_argument"})
        body = {"q": query, "num": self._settings.results, "run": self._settings.run}
        began = time.monotonic()
        try:
            answer = await self._client.post(body)
            hits = _Reply.model_validate(answer).organic
        except WebServerError as error:
            if error.kind == "request":
                return ToolResult(f"Nothing was searched: {error}.", meta={"reason": "bad_argument"})
            text = f"The {self.name} tool failed, nothing was searched: {error}"
            return ToolResult(text, ok=False, meta={"reason": error.kind or "server", "error": str(error)})
        except ValidationError:
            text = f"The {self.name} tool failed: the server's answer is no list of results"
            return ToolResult(text, ok=False, meta={"reason": "broken"})
        meta = {
            "hits": len(hits),
            "cached": bool(answer.get("cached")),
            "wall_s": round(time.monotonic() - began, 4),
        }
        shown = [_shown(number, hit) for number, hit in enumerate(hits, 1)]
        return ToolResult("\n\n".join(shown) or NOTHING_FOUND, meta=meta)

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self._client.close()


def _shown(number: int, hit: _Hit) -> str:
    return "\n".join(part for part in (f"[{number}] {hit.title}", hit.link, hit.snippet) if part)
