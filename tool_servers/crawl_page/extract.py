"""Extract the text of a page: HTML, PDF, JSON or plain text.

``python -m tool_servers.crawl_page.extract`` is a parser of :mod:`tool_servers.shared.parser_pool`, because pages may
be hostile.
"""

from __future__ import annotations

import codecs
import html
import json
import re
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from urllib.parse import urljoin

from afm.trajectory.observation import readable
from tool_servers.shared.parser_pool import serve_parser

_TITLE = re.compile(r"(?is)<title[^>]{0,200}>([^<]{1,1000})")
_BLANK_LINES = re.compile(r"\n{3,}")
_SPACE = re.compile(r"\s+")
_BLOCKS_OF_HTML5 = {"article", "br", "footer", "header", "main", "nav", "section"}
_INLINE = {"del", "ins", "td", "th"}
_TEXT_CODECS = re.compile(
    r"ascii|utf[-_](?:8|8[-_]sig|16|16[-_][bl]e|32|32[-_][bl]e)|iso8859[-_]\d+|latin[-_]1|cp\d{3,4}|koi8[-_][rtu]"
    r"|mac[-_]\w+|gb2312|gbk|gb18030|big5\w*|euc[-_]\w+|shift[-_]jis\w*|iso2022[-_]\w+|johab|hz|tis[-_]620|ptcp154"
)
_META = re.compile(rb"""(?i)<meta[^>]{0,200}?charset\s{0,9}=\s{0,9}["']?\s{0,9}([a-z0-9_:.+-]{2,40})""")
_META_BYTES = 4096
_BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
_SHORT_CHARS = 4000
"""Pages up to this number of characters are shown whole, including menus and links."""
_MAX_PDF_PAGES = 300
_MAX_TITLE_CHARS = 200
_HTML_START = re.compile(r"(?i)\s*(?:<!doctype html|<html|<head|<body)")


class NoTextError(Exception):
    """The page has no readable text."""


@dataclass(frozen=True, slots=True)
class Extracted:
    """The readable part of a page.

    Attributes:
        title: May be empty.
        text: For HTML, Markdown with headings, lists, tables and absolute links.
    """

    title: str
    text: str


def extract(body: bytes, media_type: str, charset: str | None, url: str, max_chars: int) -> Extracted:
    """Extract the text of a page according to its media type, or to its first bytes.

    Args:
        max_chars: Longer texts are cut off at the end.

    Raises:
        NoTextError: The page has no readable text.
    """
    if body[:1024].lstrip().startswith(b"%PDF-") or media_type == "application/pdf":
        page = _pdf(body, max_chars)
    else:
        text = text_of(body, charset)
        if media_type.endswith("json"):
            page = Extracted("", _json(text, max_chars))
        elif "html" in media_type or _HTML_START.match(text):
            page = _html(text, url)
        else:
            page = Extracted("", text)
    text = _BLANK_LINES.sub("\n\n", readable(page.text[:max_chars])).strip()
    if not text:
        raise NoTextError("the page holds no readable text")
    title = " ".join(readable(page.title).split())[:_MAX_TITLE_CHARS]
    return Extracted(title, text)


def text_of(body: bytes, charset: str | None) -> str:
    """Decode a body by its byte order mark, the header's charset, its ``meta`` tag, as UTF-8, or as Windows-1252.

    Invalid bytes become U+FFFD. Uses only text codecs that take linear time, whatever the page declares.
    """
    for mark, codec in _BOMS:
        if body.startswith(mark):
            return body.decode(codec, "replace")
    declared = _META.search(body, 0, _META_BYTES)
    for name in (charset, declared[1].decode() if declared else None):
        known = _codec(name)
        if known:
            return body.decode(known, "replace")
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        return body.decode("cp1252", "replace")


def _codec(name: str | None) -> str | None:
    try:
        codec = codecs.lookup(name.strip()).name if name else ""
    except (LookupError, ValueError):
        return None
    if codec in ("iso8859-1", "ascii"):
        return "cp1252"  # as browsers do
    return codec if _TEXT_CODECS.fullmatch(codec) else None


def _html(text: str, url: str) -> Extracted:
    import trafilatura

    title = _TITLE.search(text)
    main = trafilatura.extract(
        text,
        url=url,
        output_format="markdown",
        include_links=True,
        include_tables=True,
        include_comments=False,
        favor_recall=True,
        deduplicate=False,
    )
    whole = _all_words(text, url)
    shown = whole if not main or len(whole) <= _SHORT_CHARS else main
    return Extracted(html.unescape(title[1]) if title else "", shown)


def _all_words(text: str, url: str) -> str:
    """Return all visible text of a page without a main part, such as a short page, a list of links or a form."""
    from lxml import etree
    from lxml.html import HTMLParser, defs, document_fromstring

    try:
        tree = document_fromstring(text.encode(), parser=HTMLParser(encoding="utf-8", remove_comments=True))
    except (etree.ParserError, ValueError):
        return ""
    blocks = defs.block_tags - _INLINE | _BLOCKS_OF_HTML5
    etree.strip_elements(tree, "script", "style", "noscript", "template", "head", with_tail=False)
    for element in tree.iter(etree.Element):
        element.text = _SPACE.sub(" ", element.text or "")
        element.tail = _SPACE.sub(" ", element.tail or "")
        if element.tag in blocks:
            element.text, element.tail = "\n" + element.text, "\n" + element.tail
        elif element.tag in ("td", "th"):
            element.text = f" {element.text}"
        elif element.tag == "a" and element.get("href"):
            element.text = f"[{element.text}"
            element.tail = f"]({_absolute(url, element.get('href', ''))}){element.tail}"
    lines = (" ".join(line.split()) for line in tree.text_content().split("\n"))
    return "\n".join(line for line in lines if line)


def _absolute(base: str, link: str) -> str:
    try:
        return urljoin(base, link.strip())
    except ValueError:
        return ""


def _pdf(body: bytes, max_chars: int) -> Extracted:
    from pypdf import PdfReader

    reader = PdfReader(BytesIO(body), strict=False)
    pieces: list[str] = []
    length = 0
    for number, page in enumerate(reader.pages):
        if number >= _MAX_PDF_PAGES or length > max_chars:
            break
        pieces.append(page.extract_text() or "")
        length += len(pieces[-1])
    title = reader.metadata.title if reader.metadata else None
    return Extracted(title or "", "\n\n".join(pieces))


def _json(text: str, max_chars: int) -> str:
    """Indent JSON that is short enough to be shown whole; return other texts unchanged."""
    if len(text) > max_chars:
        return text
    try:
        return json.dumps(json.loads(text), indent=1, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _parse(about: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    page = extract(body, **about)
    return {"title": page.title, "text": page.text}, b""


if __name__ == "__main__":
    serve_parser("page", _parse, NoTextError)
