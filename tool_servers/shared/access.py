"""Who may use a server."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING

from afm.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

MIN_TOKEN = 16
"""Characters of a token that opens a server to other machines."""
_PLACE = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(?::[0-9]{1,5})?\Z")
_JSON = re.compile(r"application/(?:[a-z0-9.-]+\+)?json\Z")


def allowed(headers: Mapping[str, str], token: str | None) -> bool:
    """Whether a request carries the server's token; any does when the server has none. Takes constant time."""
    if token is None:
        return True
    scheme, _, key = headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(key.lstrip(" ").encode("utf-8", "replace"), token.encode())
    return same and scheme.lower() == "bearer"


def check_exposure(host: str, token: str | None, variable: str) -> None:
    """Refuse to listen beyond this machine without a token, or with one that can be guessed.

    Raises:
        ConfigError: Names the environment variable that holds the token.
    """
    if _is_loopback(host) or len(token or "") >= MIN_TOKEN:
        return
    problem = "needs a token" if token is None else f"needs a longer token, got {len(token)} characters"
    raise ConfigError(
        f"host {host!r}: a server that other machines can reach {problem}; set {variable} to a random text of at least "
        f"{MIN_TOKEN} characters (openssl rand -hex 16) here and where its clients run, or listen on 127.0.0.1"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class BrowserGuard:
    """Keeps pages in a browser on this machine from using a server, which programs on this machine may use.

    A page may post to any address as long as the body looks like a form or plain text (cross-site request forgery), so
    posted bodies are JSON. The owner of a page's domain may resolve its name to 127.0.0.1 (DNS rebinding); the browser
    then sends JSON, too, but under that name. So without a token, ``Host`` and, where there is one, ``Origin`` must name
    this machine. With a token, which no page knows, a server answers under any name: a proxy before it has its own.

    | refusal | |
    |---|---|
    | 403 | ``Origin`` is another site |
    | 415 | a posted body that is not JSON |
    | 421 | ``Host`` is another name |

    Args:
        token: What the server asks of requests.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it unread."""
        from starlette.datastructures import Headers
        from starlette.responses import JSONResponse

        refusal = self._refusal(scope["method"], Headers(scope=scope)) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, message = refusal
        body = {"error": message, "kind": "request"}
        await JSONResponse(body, status, {"Connection": "close"})(scope, receive, send)

    def _refusal(self, method: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        if self._token is None:
            host, origin = headers.get("host", ""), headers.get("origin")
            advice = "a server without a token is for this machine: set its token, or ask for 127.0.0.1"
            if not _is_this_machine(host):
                return 421, f"Host: got {host[:80]!r}, expected 127.0.0.1 or localhost; {advice}"
            if origin is not None and not _is_this_machine(re.sub(r"\Ahttps?://", "", origin)):
                return 403, f"Origin: got {origin[:80]!r}, expected none or http://localhost; {advice}"
        kind = headers.get("content-type", "")
        if method == "POST" and not _JSON.match(kind.partition(";")[0].strip().lower()):
            return 415, f"Content-Type: got {kind[:80]!r}, expected application/json"
        return None


def _is_this_machine(place: str) -> bool:
    """Whether a host, with or without a port, is a loopback address or ``localhost``."""
    match = _PLACE.match(place.lower())
    return match is not None and _is_loopback(match[1].strip("[]"))
