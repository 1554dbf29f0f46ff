"""What each server needs before it can start, and how it is started."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from afm.errors import AfmError, ConfigError, UsageError, suggestion
from afm.settings import Environment
from tool_servers.shared.access import check_exposure
from tool_servers.shared.command import KINDS

Check = Callable[[Path | None, Mapping[str, str], Environment], None]
"""Raises ``ConfigError`` for what a server lacks, given its settings file and further arguments."""

_OTHER_NAMES = {
    "crawl": "crawl_page",
    "search": "web_search",
    "visual": "visual_inspector",
    "wiki": "wiki_search",
}


class NotSetUpError(ConfigError):
    """Nobody has configured this server: `start` without names leaves it out."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one server is started.

    Attributes:
        arguments: After ``python -P -m tool_servers.NAME``.
        port: 0 for a free one.
    """

    name: str
    arguments: tuple[str, ...]
    host: str
    port: int

    def command(self) -> list[str]:
        """The words that start it; Python looks for no module in the working folder."""
        return [sys.executable, "-P", "-m", f"tool_servers.{self.name}", *self.arguments]


def named(names: Sequence[str]) -> list[str]:
    """The servers of these names, also those that ``afm serve`` uses.

    Raises:
        UsageError: There is no such server.
    """
    found = [_OTHER_NAMES.get(name, name) for name in names]
    for name in found:
        if name not in KINDS:
            raise UsageError(f"no server {name!r}; {suggestion(name, KINDS)}")
    return list(dict.fromkeys(found))


def planned(name: str, configs: Path, further: Sequence[str], environment: Environment) -> Plan:
    """How to start ``name``, once everything that it needs is there.

    Raises:
        NotSetUpError: It has not been configured.
        ConfigError: It has, but wrongly: settings, keys, token, or a port that is taken.
    """
    kind = KINDS[name]
    options = _options(further)
    config = configs / kind.config if kind.config and (configs / kind.config).exists() else None
    if "--config" in options:
        config = Path(options["--config"])
    try:
        _CHECKS[name](config, options, environment)
    except ConfigError:
        raise
    except AfmError as error:
        raise ConfigError(str(error)) from None
    host = options.get("--host", environment.server_host)
    check_exposure(host, kind.secret(environment), kind.token)
    port = _port(options.get("--port", str(kind.port(environment))))
    _check_free(host, port)
    given = ("--config", str(config)) if config is not None and "--config" not in options else ()
    http = ("--http",) if name == "mcp" and "--http" not in further else ()
    return Plan(name, (*http, *given, *further), host, port)


def check_apart(plan: Plan, others: Sequence[Plan]) -> None:
    """Refuse a server that would listen where another one that is to be started does.

    Raises:
        ConfigError: Names both.
    """
    for other in others:
        if plan.port and plan.port == other.port:
            raise ConfigError(
                f"port {plan.port} is that of {other.name}, too; choose another for one of them"
            )


def _options(further: Sequence[str]) -> dict[str, str]:
    """``--name value`` and ``--name=value``."""
    found: dict[str, str] = {}
    for number, word in enumerate(further):
        name, equals, value = word.partition("=")
        if equals:
            found[name] = value
        elif word.startswith("--") and number + 1 < len(further):
            found[word] = further[number + 1]
    return found


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise UsageError(f"--port: got {text!r}, expected a number from 0 to 65535")
    return int(text)


def _check_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ConfigError(
            f"port {port} of {host} cannot be used: {error.strerror or error}; stop what listens there, or choose another"
        ) from None


def _check_code(config: Path | None, _: Mapping[str, str], __: Environment) -> None:
    from tool_servers.code.settings import load_server_settings

    load_server_settings(config)


def _check_crawl(config: Path | None, _: Mapping[str, str], environment: Environment) -> None:
    from tool_servers.crawl_page.digest import open_digester
    from tool_servers.crawl_page.settings import CrawlSettings

    open_digester(CrawlSettings.read(config), environment)


def _check_search(config: Path | None, _: Mapping[str, str], environment: Environment) -> None:
    from tool_servers.web_search.local import check_local, open_provider
    from tool_servers.web_search.providers import SearchSettings

    settings = SearchSettings.read(config)
    if environment.web_search_method_type != "local":
        open_provider(settings, environment)
    elif environment.web_page_store is None:
        raise NotSetUpError("WEB_PAGE_STORE is not set; name a JSONL of pages, or choose serper or searxng")
    else:
        check_local(environment.web_page_store, settings.page_url)


def _check_vision(config: Path | None, _: Mapping[str, str], environment: Environment) -> None:
    from tool_servers.visual_inspector.vision import InspectorSettings, open_vision_model

    settings = InspectorSettings.read(config)
    if environment.vision_openai_api_base_url is None and environment.vision_model is None:
        raise NotSetUpError("VISION_OPENAI_API_BASE_URL and VISION_MODEL are not set")
    open_vision_model(settings, environment)
    folder = settings.folder or environment.vision_image_folder
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"folder of pictures {folder}: no such folder (VISION_IMAGE_FOLDER)")


def _check_wiki(config: Path | None, options: Mapping[str, str], _: Environment) -> None:
    from tool_servers.wiki_search.index import WikiServerSettings, served_engine
    from tool_servers.wiki_search.manifest import checked_manifest

    settings = WikiServerSettings.read(config)
    named_here = options.get("--index")
    folder = Path(named_here) if named_here else settings.index
    if folder is None or not (folder / "manifest.json").is_file():
        message = f"{folder}: no index there; build one with `afm serve wiki build CORPUS --out {folder}`"
        raise ConfigError(message) if named_here else NotSetUpError(message)
    served_engine(folder, checked_manifest(folder), options.get("--engine", settings.engine))


def _check_gateway(config: Path | None, options: Mapping[str, str], environment: Environment) -> None:
    from tool_servers.gateway.settings import GatewaySettings, open_routes

    settings = GatewaySettings.read(config)
    upstream = options.get("--upstream")
    if upstream is None and not settings.upstreams and environment.gateway_upstream_url is None:
        raise NotSetUpError("GATEWAY_UPSTREAM_URL is not set, and its YAML lists no `upstreams`")
    open_routes(settings, environment, upstream)


def _check_model(_: Path | None, options: Mapping[str, str], __: Environment) -> None:
    if "--model" not in options:
        raise NotSetUpError("no model named; servers.sh start model -- --model FOLDER")
    if not (Path(options["--model"]) / "config.json").is_file():
        raise ConfigError(f"--model: {options['--model']}: no folder with a model, which has a config.json")


def _check_mcp(_: Path | None, options: Mapping[str, str], __: Environment) -> None:
    from afm.tools import load_tools

    if "--tools" not in options:
        raise NotSetUpError(
            "no tools named; servers.sh start mcp -- --tools configs/tools/code_executor.yaml"
        )
    if not Path(options["--tools"]).is_file():
        raise ConfigError(f"--tools: {options['--tools']}: no such file")
    load_tools(Path(options["--tools"]))


_CHECKS: dict[str, Check] = {
    "code": _check_code,
    "crawl_page": _check_crawl,
    "gateway": _check_gateway,
    "mcp": _check_mcp,
    "model": _check_model,
    "visual_inspector": _check_vision,
    "web_search": _check_search,
    "wiki_search": _check_wiki,
}
