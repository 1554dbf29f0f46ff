"""``python -m tool_servers.crawl_page [--config YAML] [--host H] [--port N]``: read pages for agents."""

from __future__ import annotations

import sys

from tool_servers.shared.command import Given, ServerCommand
from tool_servers.shared.serve import serve

_PACKAGES = ("fastapi", "uvicorn", "trafilatura", "pypdf", "bm25s")


def main() -> int:
    """Serve until told to stop. Exit status 0 then, 1 when it cannot serve, 2 for wrong usage."""
    return ServerCommand("crawl_page", "Read public web pages for agents.", _PACKAGES).run(_serve)


def _serve(given: Given) -> None:
    from tool_servers.crawl_page.app import crawl_app
    from tool_servers.crawl_page.settings import CrawlSettings

    settings = CrawlSettings.read(given.config)
    place = given.place()
    app = crawl_app(settings, given.environment, place.token)
    serve(app, place.host, place.port, token=place.token, finish_s=settings.finish_s)


if __name__ == "__main__":
    sys.exit(main())
