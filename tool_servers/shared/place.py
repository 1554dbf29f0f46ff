"""Where the web servers keep what they found."""

from __future__ import annotations

from pathlib import Path

from afm.settings import Environment


def cache_place(environment: Environment) -> str:
    """``WEB_CACHE``, or a file in the user's cache folder."""
    secret = environment.web_cache
    return secret.get_secret_value() if secret else str(Path("~/.cache/afm/web.sqlite").expanduser())
