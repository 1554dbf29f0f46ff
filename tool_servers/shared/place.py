"""Where the web servers keep what they found, and what lets clients in."""

from __future__ import annotations

from pathlib import Path

from afm.settings import Settings

TOKEN_VARIABLE = "WEB_SERVER_TOKEN"


def cache_place(environment: Settings) -> str:
    """``WEB_CACHE``, or a file in the user's cache folder."""
    secret = environment.web_cache
    return secret.get_secret_value() if secret else str(Path("~/.cache/afm/web.sqlite").expanduser())


def web_token(environment: Settings) -> str | None:
    """``WEB_SERVER_TOKEN``."""
    secret = environment.web_server_token
    return secret.get_secret_value() if secret else None
