"""Addresses as agents write them: separated by ``|``, as markdown links, in angle brackets, in lists."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_BARE_HOST = re.compile(r"(?i)(?:[a-z0-9-]+\.)+[a-z]{2,}(?::\d+)?(?:[/?#]\S*)?\Z")
_BULLET = re.compile(r"\s*(?:[-*+]|\d{1,3}[.)])\s+")
_SEPARATOR = re.compile(r"\s*\|\s*(?=$|\[|<|(?i:https?:))|\s+\|\s*|\s*\|\s+|\n")


def urls_in(text: str) -> list[str]:
    """The addresses in ``text``, each once, in order; what is no address is returned as it is, to be reported.

    A ``|`` without blanks around it separates only if an address follows, since addresses may contain it.
    """
    found: list[str] = []
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
        found += [_cleaned(piece) for piece in _SEPARATOR.split(before)]
        found.append(_cleaned(link.split(" ")[0] if link else ""))
    return list(dict.fromkeys(url for url in found if url))


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
