"""Who may use a server."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from ipaddress import ip_address

from afm.errors import ConfigError

MIN_TOKEN = 16
"""Characters of a token that opens a server to other machines."""


def allowed(headers: Mapping[str, str], token: str | None) -> bool:
    """Whether a request carries the server's token; any does when the server has none. Takes constant time."""
    if token is None:
        return True
    given = headers.get("authorization", "")
    return hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {token}".encode())


def check_exposure(host: str, token: str | None, variable: str) -> None:
    """Refuse to listen beyond this machine without a token, or with one that can be guessed.

    Raises:
        ConfigError: Names the environment variable that holds the token.
    """
    if _is_loopback(host) or len(token or "") >= MIN_TOKEN:
        return
    found = "needs a token" if token is None else f"needs a longer token, got {len(token)} characters"
    raise ConfigError(
        f"host {host!r}: a server that other machines can reach {found}; set {variable} to a random text of at least "
        f"{MIN_TOKEN} characters (openssl rand -hex 16) here and where its clients run, or listen on 127.0.0.1"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
