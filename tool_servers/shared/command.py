"""What the servers' command lines have in common: ``python -m tool_servers.NAME [--config YAML] [--host H] [--port N]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from afm.errors import AfmError, MissingExtraError
from afm.settings import Environment, load_settings
from tool_servers.shared.access import check_exposure

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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server listens, and what lets clients in."""

    host: str
    port: int
    token: str | None


@dataclass(frozen=True, slots=True)
class Given:
    """What a server was told.

    Attributes:
        options: From the command line.
        environment: From environment variables.
    """

    name: str
    options: argparse.Namespace
    environment: Environment

    @property
    def config(self) -> Path | None:
        """The file of its settings."""
        path: Path | None = self.options.config
        return path

    def place(self) -> Place:
        """Where to listen: as the command line says, else as the environment does.

        Raises:
            ConfigError: Other machines could reach it, and no token is set.
        """
        kind = KINDS[self.name]
        host = self.options.host or self.environment.server_host
        port = kind.port(self.environment) if self.options.port is None else self.options.port
        token = kind.secret(self.environment)
        check_exposure(host, token, kind.token)
        return Place(host, port, token)


class ServerCommand:
    """The command line of one server.

    Args:
        name: Its package in ``tool_servers``.
        purpose: The first sentence of its help.
        packages: What must be installed.

    Attributes:
        parser: For options of its own.
    """

    def __init__(self, name: str, purpose: str, packages: Sequence[str]) -> None:
        kind = KINDS[name]
        self._name = name
        self._packages = packages
        self.parser = argparse.ArgumentParser(
            prog=f"python -m tool_servers.{name}",
            description=f"{purpose} The token comes from {kind.token}.",
        )
        if kind.config is not None:
            example = f"configs/servers/{kind.config}"
            self.parser.add_argument("--config", type=Path, help=f"YAML, e.g. {example}")
        self.parser.add_argument("--host", help="address to listen on (SERVER_HOST; 127.0.0.1)")
        self.parser.add_argument(
            "--port",
            type=int,
            help=f"port, 0 for a free one ({f'{kind.place}; ' if kind.place else ''}{kind.port(Environment.model_construct())})",
        )

    def run(self, work: Callable[[Given], None]) -> int:
        """Serve until told to stop. Exit status 0 then, 1 when it cannot serve, 2 for wrong usage."""
        options = self.parser.parse_args()
        try:
            for package in self._packages:
                if find_spec(package) is None:
                    raise MissingExtraError(package, "servers")
            work(Given(self._name, options, load_settings()))
        except AfmError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        return 0
