"""Who may use a server."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from ipaddress import ip_address

from afm.errors import ConfigError


def allowed(headers: Mapping[str, str], token: str | None) -> bool:
    """Whether a request carries the server's token; any does when the server has none. Takes constant time."""
    if token is None:
        return True
    given = headers.get("authorization", "")
    return hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {token}".encode())


def check_exposure(host: str, token: str | None, variable: str) -> None:
    """Refuse to listen beyond this machine without a token.

    Raises:
        ConfigError: Names the environment variable that holds the token.
    """
    if token is None and not _is_loopback(host):
        raise ConfigError(
            f"host {host!r}: a server that other machines can reach needs a token; set {variable} to a long random "
            "text here and where its clients run, or listen on 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
