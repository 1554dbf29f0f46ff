"""The servers there are, and which environment variables say where they listen and who may use them."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from pydantic import SecretStr

from afm.settings import Environment

_PORT = 8000


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of server.

    Attributes:
        token: Environment variable of its token.
        place: Environment variable of its port, or of its whole address, if there is one.
        config: File name of its settings in ``configs/servers``.
    """

    token: str
    place: str | None = None
    config: str | None = None

    def secret(self, environment: Environment) -> str | None:
        """The token itself."""
        value: SecretStr | None = getattr(environment, self.token.lower())
        return value.get_secret_value() if value else None

    def port(self, environment: Environment) -> int:
        """Where it listens when it is not told."""
        if self.place is None:
            return _PORT
        value: int | str = getattr(environment, self.place.lower())
        return value if isinstance(value, int) else urlsplit(value).port or _PORT


KINDS = {
    "code": Kind("CODE_SERVER_TOKEN", "CODE_SERVER_PORT", "code.yaml"),
    "crawl_page": Kind("WEB_SERVER_TOKEN", "CRAWL_PAGE_PORT", "crawl_page.yaml"),
    "gateway": Kind("GATEWAY_TOKEN", "GATEWAY_PORT", "gateway.yaml"),
    "mcp": Kind("MCP_SERVER_TOKEN", "MCP_SERVER_PORT"),
    "model": Kind("AFM_MODEL_API_KEY"),
    "visual_inspector": Kind("WEB_SERVER_TOKEN", "VISUAL_INSPECTOR_PORT", "visual_inspector.yaml"),
    "web_search": Kind("WEB_SERVER_TOKEN", "WEBSEARCH_PORT", "web_search.yaml"),
    "wiki_search": Kind("WIKI_SERVER_TOKEN", "WIKI_RAG_SERVER_URL", "wiki.yaml"),
}
