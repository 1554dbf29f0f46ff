"""Check links to files outside ``docs``, show them as text, and bring in pages from other folders.

A hook of MkDocs (https://www.mkdocs.org/user-guide/configuration/#hooks).
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BROUGHT_IN = {"benchmarks.md": "benchmarks/README.md", "changelog.md": "CHANGELOG.md"}
"""Maps a page of the site to the file that has its text."""

_LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)\s]+)\)")
_ROLE = re.compile(r":(?:mod|class|func|meth|data|attr|exc):<code>~?")
_log = logging.getLogger("mkdocs.hooks.outside")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page with links that work on the site."""
    name = page.file.src_uri
    source = BROUGHT_IN.get(name)
    if source is not None:
        markdown = (ROOT / source).read_text(encoding="utf-8")
    folder = (ROOT / (source or f"docs/{name}")).parent
    return _LINK.sub(lambda link: _link(link, folder, name), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Remove the roles of Sphinx from names in docstrings."""
    return _ROLE.sub("<code>", html)


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
