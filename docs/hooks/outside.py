"""Check links to files outside ``docs``, show them as text, bring in pages from other folders, and label wide tables.

A hook of MkDocs (https://www.mkdocs.org/user-guide/configuration/#hooks).
"""

from __future__ import annotations

import logging
import re
from itertools import cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BROUGHT_IN = {"benchmarks.md": "benchmarks/README.md", "changelog.md": "CHANGELOG.md"}
"""Maps a page of the site to the file that has its text."""

_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)\s]+)\)")
_ROLE = re.compile(r":(?:mod|class|func|meth|data|attr|exc):<code>~?")
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_HEAD = re.compile(r"<th(?: [^>]*)?>(.*?)</th>", re.DOTALL)
_CODE = re.compile(r"`[^`]+`")
_log = logging.getLogger("mkdocs.hooks.outside")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page with links that work on the site."""
    name = page.file.src_uri
    source = BROUGHT_IN.get(name)
    if source is not None:
        markdown = (ROOT / source).read_text(encoding="utf-8")
    folder = (ROOT / (source or f"docs/{name}")).parent
    # GitHub needs the backslash before a vertical line in code in a table. Here it would be shown.
    lines = (
        _CODE.sub(lambda code: code[0].replace("\\|", "|"), line) if line.startswith("|") else line
        for line in markdown.split("\n")
    )
    return _LINK.sub(lambda link: _link(link, folder, name), "\n".join(lines))


def on_page_content(html: str, **_: Any) -> str:
    """Remove the roles of Sphinx from names in docstrings, and name the column of each cell of a wide table."""
    return _TABLE.sub(_labelled, _ROLE.sub("<code>", html))


def _labelled(table: re.Match[str]) -> str:
    """Return the table with ``data-label`` in its cells if it has three columns or more: site.css shows it on a phone."""
    heads = [re.sub(r"<[^>]+>", "", head).replace('"', "&quot;") for head in _HEAD.findall(table[0])]
    if len(heads) < 3:
        return table[0]
    labels = cycle(heads)
    return re.sub(r"<td(?=[ >])", lambda _: f'<td data-label="{next(labels)}"', table[0])


def _link(link: re.Match[str], folder: Path, name: str) -> str:
    text, target = link.groups()
    path, _, anchor = target.partition("#")
    file = (folder / path).resolve()
    if not file.exists():
        _log.warning("%s: link to %s, which does not exist", name, target)
        return link[0]
    docs = ROOT / "docs"
    if file.is_relative_to(docs) and file.suffix == ".md":
        depth = "../" * (len(Path(name).parts) - 1)
        return f"[{text}]({depth}{file.relative_to(docs).as_posix()}{f'#{anchor}' if anchor else ''})"
    for page, source in BROUGHT_IN.items():
        if file == ROOT / source:
            return f"[{text}]({'../' * (len(Path(name).parts) - 1)}{page})"
    shown = f"`{file.relative_to(ROOT).as_posix()}`"
    if file.is_relative_to(docs):
        return link[0]
    return shown if f"`{text.strip('`')}`" == shown else f"{text} ({shown})"
