"""The page tool: a page server reads pages and summarizes them with regard to the goal of the episode.

Agents write addresses separated by ``|``, as Markdown links, in angle brackets or in lists. :func:`urls_in` reads them.
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
    """Return the distinct addresses in ``text`` in order, and any other pieces unchanged, so that they can be reported.

    A ``|`` without blanks around it separates only if an address follows, because addresses may contain it.
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
    """Return whether a result of :func:`urls_in` is a full web address."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _closing(text: str, position: int) -> int:
    """Return the position of the parenthesis that closes a link, or -1. Those inside the address come in pairs."""
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
    """Time limit of a request in seconds. The server receives it too and answers in time with what it has."""
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
    """Reads the pages at addresses that are separated by ``|`` or are Markdown links."""

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
        """Return the addresses unchanged. There is at least one, and the server splits them in the same way."""
        listed = argument[:_MAX_ARGUMENT_CHARS]
        if not any(map(is_address, urls_in(listed))):
            raise BadArgumentError(NO_ADDRESS)
        return listed

    def request(self, asked: str) -> Mapping[str, Any]:
        """Return the request body with the addresses and the goal of the episode."""
        return {
            "urls": asked,
            "goal": self.context(),
            "seconds": self.settings.timeout_s - MARGIN_S,
        }

    def context(self) -> str:
        """Return the goal if the server gets it, else an empty text. See :class:`afm.tools.base.ContextTool`."""
        return current_goal() if self.settings.goal else ""

    def shown(self, reply: _PageReply) -> ToolResult:
        """Return the pages one after the other, with the reason for each that could not be read."""
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
