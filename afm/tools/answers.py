"""How tool servers are asked, and what they say when a request fails."""

from __future__ import annotations

import json

KEPT_OPEN = 64
"""Connections to one kind of server that stay open between requests."""
LONGEST_PAUSE_S = 5.0
"""Before a request is repeated: an episode waits meanwhile."""
_SHOWN_CHARS = 300


def read_failure(content: bytes) -> tuple[str, str]:
    """The message of a failed request and the server's name for that kind of failure; ``""`` when it gives none."""
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError):
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        return answer["error"][:_SHOWN_CHARS] or "no text", str(answer.get("kind", ""))
    return content[:_SHOWN_CHARS].decode("utf-8", "replace") or "no text", ""
