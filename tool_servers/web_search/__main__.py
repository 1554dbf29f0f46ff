"""``python -m tool_servers.web_search [--config YAML] [--host H] [--port N]``: search the web for agents."""

from __future__ import annotations

import sys

from tool_servers.shared.command import Given, ServerCommand
from tool_servers.shared.serve import serve

_PACKAGES = ("fastapi", "uvicorn", "bm25s", "numpy")


def main() -> int:
    """Serve until told to stop. Exit status 0 then, 1 when it cannot serve, 2 for wrong usage."""
    return ServerCommand("web_search", "Search the web for agents.", _PACKAGES).run(_serve)


def _serve(given: Given) -> None:
    from tool_servers.web_search.app import search_app
    from tool_servers.web_search.providers import SearchSettings

    settings = SearchSettings.read(given.config)
    place = given.place()
    app = search_app(settings, given.environment, place.token)
    serve(app, place.host, place.port, token=place.token, finish_s=settings.finish_s)


if __name__ == "__main__":
    sys.exit(main())
