"""The page tool: pages read by a page server, summed up toward what the episode is after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from afm.errors import BadArgumentError
from afm.tools.addresses import is_address, urls_in
from afm.tools.base import ToolResult
from afm.tools.goal import current_goal
from afm.tools.web_client import ServerKind
from afm.tools.web_tool import MARGIN_S, WebTool, WebToolSettings

NO_ADDRESS = "Nothing was read: found no address. Write full addresses such as https://en.wikipedia.org/wiki/Quito, separated by |."
_MAX_ARGUMENT_CHARS = 50_000


class CrawlPageSettings(WebToolSettings):
    """Settings of :class:`CrawlPageTool` in a tools file. Without ``urls``: ``SERVER_HOST`` and ``CRAWL_PAGE_PORT``.

    Attributes:
        timeout_s: For one request. The server is told, and answers with what it has by then.
        goal: Whether the server is told the question and the agent's last thought.
    """

    timeout_s: float = Field(default=95.0, gt=2 * MARGIN_S)
    goal: bool = True


class _Page(BaseModel):
    url: str
    title: str = ""
    text: str
    kind: str | None = None
    cached: bool = False


class _PageReply(BaseModel):
    pages: list[_Page]
    left_out: int = 0


class CrawlPageTool(WebTool[CrawlPageSettings, str, _PageReply]):
    """Reads the pages at some addresses: separated by ``|``, or markdown links."""

    settings_type = CrawlPageSettings
    reply_type = _PageReply
    server = ServerKind(
        path="/crawl_page",
        answer="{pages: [{url, title, text, kind, cached}], left_out}",
        token="WEB_SERVER_TOKEN",
        address=lambda environment: f"http://{environment.server_host}:{environment.crawl_page_port}",
    )
    usual_name = "crawl_page"
    failure = "nothing was read"

    @classmethod
    def read(cls, argument: str) -> str:
        """The addresses as they are, at least one; the server takes them apart in the same way."""
        listed = argument[:_MAX_ARGUMENT_CHARS]
        if not any(map(is_address, urls_in(listed))):
            raise BadArgumentError(NO_ADDRESS)
        return listed

    def request(self, asked: str) -> Mapping[str, Any]:
        """The addresses, and what the episode is after."""
        return {
            "urls": asked,
            "goal": self.context(),
            "seconds": self.settings.timeout_s - MARGIN_S,
        }

    def context(self) -> str:
        """The goal, when the server is told; see :class:`afm.tools.base.ContextTool`."""
        return current_goal() if self.settings.goal else ""

    def shown(self, reply: _PageReply) -> ToolResult:
        """The pages one after the other, those that could not be read with the reason."""
        if not reply.pages:
            return ToolResult(NO_ADDRESS, meta={"reason": "bad_argument"})
        meta = {
            "pages": sum(page.kind is None for page in reply.pages),
            "failures": [page.kind for page in reply.pages if page.kind is not None],
            "cached": sum(page.cached for page in reply.pages),
        }
        parts = [_shown(page) for page in reply.pages]
        if reply.left_out:
            parts.append(f"({reply.left_out} more addresses were left out; ask for fewer at once.)")
        return ToolResult("\n\n---\n\n".join(parts), meta=meta)


def _shown(page: _Page) -> str:
    if page.kind is not None:
        return f"{page.url}\nThis page could not be read: {page.text}."
    heading = f"{page.title}\n{page.url}" if page.title else page.url
    return f"{heading}\n\n{page.text}"
