"""The servers by name, their command lines, and the settings that all their YAML files share."""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from errno import EACCES, EADDRINUSE
from importlib import import_module
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from afm.configuration import Settings, read_file, validated
from afm.endpoints.connections import environment_key
from afm.errors import ConfigError, MissingExtraError, UsageError, suggestion
from afm.settings import Environment

LOG_VARIABLE = "AFM_SERVER_LOG"
"""``BYTES:PATH``, set by the process that sends a server's standard output and errors to ``PATH``."""
MIN_TOKEN = 16
"""Shortest token, in characters, with which a server may listen to other machines."""
_PORT = 8000
_BACKLOG = 2048
_PACKAGES = ("starlette", "uvicorn", "prometheus_client")


class NotSetUpError(ConfigError):
    """A server without a configuration; ``start`` without names skips it."""


@dataclass(frozen=True, slots=True)
class ServerEntry:
    """What the command line knows about a server before it imports the module.

    Attributes:
        token: Environment variable that holds the token.
        port_variable: Environment variable that holds the port or the whole address.
        config: File name of the settings in ``configs/servers``.
        packages: Packages that the server needs in addition to the web server.
    """

    token: str
    port_variable: str | None = None
    config: str | None = None
    packages: tuple[str, ...] = ()

    def port(self, environment: Environment) -> int:
        """Return the default port.

        Raises:
            ConfigError: The address in the environment has no valid port.
        """
        if self.port_variable is None:
            return _PORT
        value: int | str = getattr(environment, self.port_variable.lower())
        try:
            return value if isinstance(value, int) else urlsplit(value).port or _PORT
        except ValueError as error:
            message = f"{self.port_variable}: {error}, got {value!r}; expected http://HOST:PORT/retrieve"
            raise ConfigError(message) from None


_PAGES = ("trafilatura", "pypdf", "bm25s")
KINDS = {
    "code": ServerEntry("CODE_SERVER_TOKEN", "CODE_SERVER_PORT", "code.yaml"),
    "crawl_page": ServerEntry("WEB_SERVER_TOKEN", "CRAWL_PAGE_PORT", "crawl_page.yaml", _PAGES),
    "gateway": ServerEntry("GATEWAY_TOKEN", "GATEWAY_PORT", "gateway.yaml"),
    "mcp": ServerEntry("MCP_SERVER_TOKEN", "MCP_SERVER_PORT", packages=("mcp",)),
    "model": ServerEntry("AFM_MODEL_API_KEY"),
    "visual_inspector": ServerEntry(
        "WEB_SERVER_TOKEN", "VISUAL_INSPECTOR_PORT", "visual_inspector.yaml", ("PIL",)
    ),
    "web_search": ServerEntry("WEB_SERVER_TOKEN", "WEBSEARCH_PORT", "web_search.yaml", ("bm25s", "numpy")),
    "wiki_search": ServerEntry("WIKI_SERVER_TOKEN", "WIKI_RAG_SERVER_URL", "wiki.yaml", ("numpy",)),
}


def load_server(name: str) -> Any:
    """Import and return the module of a server.

    Every module has ``check(launch)``, ``open_app(launch)`` and ``trial(client)``; some have ``add_options(parser)``.
    ``check`` raises ``ConfigError`` for missing settings and opens nothing large. ``trial`` makes one real request.

    Raises:
        MissingExtraError: A package is not installed.
    """
    for package in (*_PACKAGES, *KINDS[name].packages):
        if find_spec(package) is None:
            raise MissingExtraError(package, "servers")
    in_folder = Path(__file__).parents[1].joinpath(name).is_dir()
    return import_module(f"tool_servers.{name}.server" if in_folder else f"tool_servers.{name}")


def own_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def or_cores(most: int = 1 << 16) -> BeforeValidator:
    """Return a validator that replaces ``null`` by the number of cores, at most ``most``."""
    return BeforeValidator(lambda number: min(most, own_cores()) if number is None else number)


CORES: Any = None
"""The default of a field with :func:`or_cores`, typed so that type checkers accept it."""


class ServerSettings(Settings):
    """How much work a server accepts."""

    content: ClassVar[str] = "server settings"
    """What error messages call the file's content."""

    max_parallel: int = Field(default=64, ge=1)
    """Requests that are processed at the same time."""
    max_waiting: int = Field(default=512, ge=0)
    """Requests that may wait in the queue. Further ones get status 429."""
    max_wait_s: float = Field(default=20.0, gt=0)
    """Seconds that a request may wait in the queue. Then it gets status 429."""
    finish_s: float = Field(default=10.0, gt=0)
    """Seconds that running requests get to finish when the server stops."""

    @classmethod
    def read(cls, path: Path | None) -> Self:
        """Read settings from a YAML file, whose paths are relative to the working folder; without one, use defaults.

        Raises:
            ConfigError: A setting is invalid; names the file, the key, the value and what was expected.
        """
        return cls() if path is None else validated(cls, read_file(path, cls.content), str(path))


def check_exposure(host: str, token: str | None, variable: str) -> None:
    """Refuse to listen to other machines without a token, or with a token that can be guessed.

    Raises:
        ConfigError: The token is missing or too short; names its environment variable.
    """
    if re.search(r"/|^[^:]*:\d*$", host):
        raise ConfigError(
            f"host {host!r}: expected a name or an address alone, for example 127.0.0.1; the port goes into --port"
        )
    if is_loopback(host) or len(token or "") >= MIN_TOKEN:
        return
    problem = "needs a token" if token is None else f"needs a longer token, got {len(token)} characters"
    raise ConfigError(
        f"host {host!r}: a server that other machines can reach {problem}; set {variable} to a random text of at least "
        f"{MIN_TOKEN} characters (openssl rand -hex 16) here and where its clients run, or listen on 127.0.0.1"
    )


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is ``localhost`` or an address of the loopback device."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and the token that it asks of clients."""

    host: str
    port: int
    token: str | None

    def listen(self) -> socket.socket:
        """Return a listening socket; port 0 picks a free port.

        Raises:
            ConfigError: The server cannot listen there.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            listener = socket.create_server((self.host, self.port), family=family, backlog=_BACKLOG)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            step = "choose another --host: 127.0.0.1 for this machine only, 0.0.0.0 for all of its addresses"
            if error.errno == EADDRINUSE:
                step = "stop the program that listens there, or choose another port with --port"
            elif error.errno == EACCES:
                step = "choose a port above 1023 with --port"
            raise ConfigError(f"cannot listen on {self.host}, port {self.port}: {why}; {step}") from None
        # asyncio sets this option only on sockets that name their protocol, which these do not. Without it, every response
        # waits 40 ms until the client acknowledges its head. Connections inherit the option.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener


@dataclass(frozen=True, slots=True)
class Launch:
    """The command line and the environment with which a server starts."""

    name: str
    options: argparse.Namespace
    environment: Environment

    @property
    def config(self) -> Path | None:
        """The settings file."""
        path: Path | None = self.options.config
        return path

    def address(self) -> Address:
        """Return where to listen: from the command line, or else from the environment.

        Raises:
            ConfigError: Other machines could reach the server, and the token is missing or too short.
        """
        kind = KINDS[self.name]
        host = self.options.host or self.environment.server_host
        port = kind.port(self.environment) if self.options.port is None else self.options.port
        token = environment_key(kind.token, self.environment)
        check_exposure(host, token, kind.token)
        return Address(host, port, token)


def parse_launch(name: str, words: Sequence[str], environment: Environment) -> Launch:
    """Parse the command line of one server; wrong usage ends the process with status 2.

    Raises:
        UsageError: The server is unknown.
        MissingExtraError: A package is not installed.
    """
    if name not in KINDS:
        raise UsageError(f"no server {name!r}; {suggestion(name, KINDS)}")
    kind = KINDS[name]
    module = load_server(name)
    purpose = module.__doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog=f"python -m tool_servers {name}", description=f"{purpose} The token comes from {kind.token}."
    )
    if kind.config is not None:
        parser.add_argument("--config", type=Path, help=f"YAML file, e.g. configs/servers/{kind.config}")
    parser.add_argument("--host", help="address to listen on (SERVER_HOST; 127.0.0.1)")
    default = kind.port(Environment.model_construct())
    variable = f"{kind.port_variable}; " if kind.port_variable else ""
    parser.add_argument("--port", type=_port, help=f"port; 0 picks a free one ({variable}{default})")
    if hasattr(module, "add_options"):
        module.add_options(parser)
    return Launch(name, parser.parse_args(words), environment)


def checked_command(
    name: str, configs: Path, words: Sequence[str], environment: Environment
) -> tuple[list[str], int]:
    """Check that ``name`` can start; return its command and its port.

    Raises:
        NotSetUpError: The server is not configured.
        AfmError: Its settings, keys, token or port are wrong, or the port is taken.
    """
    kind = KINDS[name]
    own = ["--http"] if name == "mcp" else []
    if kind.config and (configs / kind.config).exists():
        own += ["--config", str(configs / kind.config)]
    launch = parse_launch(name, [*own, *words], environment)
    load_server(name).check(launch)
    address = launch.address()
    address.listen().close()
    return serve_command(name, [*own, *words]), address.port


def serve_command(name: str, words: Sequence[str]) -> list[str]:
    """Return the command that starts a server; Python does not import from the working folder."""
    return [sys.executable, "-P", "-m", "tool_servers", name, *words]


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number from 0 to 65535")
    return int(text)
