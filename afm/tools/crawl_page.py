"""The page tool: pages read by a page server, summed up toward what the episode is after."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from afm.configuration import validated
from afm.errors import ConfigError
from afm.settings import load_settings
from afm.tools.base import ToolResult
from afm.tools.goal import current_goal
from afm.tools.registry import ToolContext, ToolSchema
from afm.tools.web_client import WebClient, WebServerError

NO_ADDRESS = "Nothing was read: found no address. Write full addresses such as https://en.wikipedia.org/wiki/Quito, separated by |."
_PATH = "/crawl_page"
_MARGIN_S = 2.0
"""Of the time for a request, kept for the way there and back."""
_MAX_ARGUMENT_CHARS = 50_000


class CrawlPageSettings(BaseModel):
    """Settings of :class:`CrawlPageTool` in a tools file.

    Attributes:
        urls: Servers, with or without ``/crawl_page``; asked in turn. By default ``SERVER_HOST`` and ``CRAWL_PAGE_PORT``.
        timeout_s: For one request. The server is told, and answers with what it has by then.
        tries: Requests before a failure counts, each to the next server.
        busy_s: How long to keep asking servers that are well but full.
        goal: Whether the server is told the question and the agent's last thought.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    urls: tuple[str, ...] = ()
    timeout_s: float = Field(default=95.0, gt=2 * _MARGIN_S)
    tries: int = Field(default=2, ge=1)
    busy_s: float = Field(default=120.0, ge=0)
    goal: bool = True


class _Page(BaseModel):
    url: str
    title: str = ""
    text: str
    kind: str | None = None
    cached: bool = False


class _Reply(BaseModel):
    pages: list[_Page]
    left_out: int = 0


class CrawlPageTool:
    """Reads the pages at some addresses.

    Args:
        urls: At least one address; the path ``/crawl_page`` may be left out.
        token: Sent in the header ``Authorization`` and nowhere else.

    Raises:
        ConfigError: No address, or one that is not ``http://`` or ``https://``.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        settings: CrawlPageSettings | None = None,
        token: str | None = None,
        name: str = "crawl_page",
        schema: ToolSchema | None = None,
    ) -> None:
        self.name = name
        self.schema = schema
        self._settings = settings or CrawlPageSettings()
        self._client = WebClient(
            urls,
            _PATH,
            token=token,
            timeout_s=self._settings.timeout_s,
            tries=self._settings.tries,
            busy_s=self._settings.busy_s,
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], context: ToolContext) -> CrawlPageTool:
        """A tool with the settings of a tools file; see :class:`CrawlPageSettings`."""
        settings = validated(CrawlPageSettings, config, context.label, context.at)
        environment = load_settings()
        secret = environment.web_server_token
        urls = settings.urls or (f"http://{environment.server_host}:{environment.crawl_page_port}",)
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
        """Read the pages in ``argument``: addresses separated by ``|``, or markdown links."""
        if not argument.strip():
            return ToolResult(NO_ADDRESS, meta={"reason": "bad_argument"})
        body = {
            "urls": argument[:_MAX_ARGUMENT_CHARS],
            "goal": current_goal() if self._settings.goal else "",
            "seconds": self._settings.timeout_s - _MARGIN_S,
        }
        began = time.monotonic()
        try:
            reply = _Reply.model_validate(await self._client.post(body))
        except WebServerError as error:
            if error.kind == "request":
                return ToolResult(f"Nothing was read: {error}.", meta={"reason": "bad_argument"})
            text = f"The {self.name} tool failed, nothing was read: {error}"
            return ToolResult(text, ok=False, meta={"reason": error.kind or "server", "error": str(error)})
        except ValidationError:
            text = f"The {self.name} tool failed: the server's answer holds no pages"
            return ToolResult(text, ok=False, meta={"reason": "broken"})
        if not reply.pages:
            return ToolResult(NO_ADDRESS, meta={"reason": "bad_argument"})
        meta = {
            "pages": sum(page.kind is None for page in reply.pages),
            "failures": [page.kind for page in reply.pages if page.kind is not None],
            "cached": sum(page.cached for page in reply.pages),
            "wall_s": round(time.monotonic() - began, 4),
        }
        shown = [_shown(page) for page in reply.pages]
        if reply.left_out:
            shown.append(f"({reply.left_out} more addresses were left out; ask for fewer at once.)")
        return ToolResult("\n\n---\n\n".join(shown), meta=meta)

    async def close(self) -> None:
        """Close the connections of this event loop."""
        await self._client.close()


def _shown(page: _Page) -> str:
    if page.kind is not None:
        return f"{page.url}\nThis page could not be read: {page.text}."
    heading = f"{page.title}\n{page.url}" if page.title else page.url
    return f"{heading}\n\n{page.text}"
