"""The page tool: pages read by a page server, summed up toward what the episode is after.

Agents write addresses separated by ``|``, as markdown links, in angle brackets or in lists: :func:`urls_in`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, Field

from afm.errors import BadArgumentError
from afm.tools.base import ToolResult, current_goal
from afm.tools.web_tool import MARGIN_S, ServerKind, WebTool, WebToolSettings

_BARE_HOST = re.compile(r"(?i)(?:[a-z0-9-]+\.)+[a-z]{2,}(?::\d+)?(?:[/?#]\S*)?\Z")
_BULLET = re.compile(r"\s*(?:[-*+]|\d{1,3}[.)])\s+")
_SEPARATOR = re.compile(r"\s*\|\s*(?=$|\[|<|(?i:https?:))|\s+\|\s*|\s*\|\s+|\n")


def urls_in(text: str) -> list[str]:
    """The addresses in ``text``, each once, in order; anything else is returned unchanged, so that it can be reported.

    A ``|`` without blanks around it separates only if an address follows, since addresses may contain it.
    """
    urls: list[str] = []
    rest = []
    position = 0
    while (start := text.find("](", position)) >= 0:
        end = _closing(text, start + 2)
        opening = text.rfind("[", position, start)
        if end < 0 or opening < 0:
            break
        rest.append((text[position:opening], text[start + 2 : end]))
        position = end + 1
    for before, link in [*rest, (text[position:], "")]:
        urls += [_cleaned(piece) for piece in _SEPARATOR.split(before)]
        urls.append(_cleaned(link.split(" ")[0] if link else ""))
    return list(dict.fromkeys(url for url in urls if url))


def is_address(url: str) -> bool:
    """Whether one of :func:`urls_in` is a full address of the web."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _closing(text: str, position: int) -> int:
    """The parenthesis that closes a link; those inside the address come in pairs."""
    depth = 0
    for place in range(position, min(len(text), position + 5000)):
        if text[place] == "(":
            depth += 1
        elif text[place] == ")":
            if depth == 0:
                return place
            depth -= 1
    return -1


def _cleaned(piece: str) -> str:
    text = _BULLET.sub("", piece, count=1).strip().strip(",;").strip()
    if text.startswith("<") and text.endswith(">"):
        text = text[1:-1].strip()
    text = text.strip("`\"'")
    return f"https://{text}" if _BARE_HOST.match(text) else text


NO_ADDRESS = "Nothing was read: found no address. Write full addresses such as https://en.wikipedia.org/wiki/Quito, separated by |."
_MAX_ARGUMENT_CHARS = 50_000


class CrawlPageSettings(WebToolSettings):
    """Settings of :class:`CrawlPageTool` in a tools file. Without ``urls``: ``SERVER_HOST`` and ``CRAWL_PAGE_PORT``."""

    timeout_s: float = Field(default=95.0, gt=2 * MARGIN_S)
    """For one request. The server knows it, and answers with what it has by then."""
    goal: bool = True
    """Whether the server gets the question and the agent's last thought."""


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
        address=lambda environment: environment.server_address(environment.crawl_page_port),
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
        """The goal, when the server gets it; see :class:`afm.tools.base.ContextTool`."""
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
