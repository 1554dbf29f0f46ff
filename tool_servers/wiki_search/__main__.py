"""``python -m tool_servers.wiki_search --index FOLDER``: serve an index over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path

from afm.errors import ConfigError
from tool_servers.shared.command import Given, ServerCommand
from tool_servers.shared.serve import serve


def main() -> int:
    """Serve until told to stop. Exit status 0 then, 1 when it cannot serve, 2 for wrong usage."""
    purpose = "Serve an index made by `afm serve wiki build`."
    command = ServerCommand("wiki_search", purpose, ("starlette", "uvicorn", "numpy"))
    command.parser.add_argument("--index", type=Path, help="folder of the index")
    command.parser.add_argument("--engine", choices=("auto", "bm25", "dense", "hybrid"))
    command.parser.add_argument(
        "--verify", action="store_true", help="compare the checksum of every byte first"
    )
    return command.run(_serve)


def _serve(given: Given) -> None:
    from tool_servers.wiki_search.app import WikiServer
    from tool_servers.wiki_search.index import WikiServerSettings, open_index

    options, settings = given.options, WikiServerSettings.read(given.config)
    folder = options.index or settings.index
    if folder is None:
        raise ConfigError("no index given; name its folder with --index, or as `index` in the YAML")
    place = given.place()
    index = open_index(
        folder,
        options.engine or settings.engine,
        model=settings.model,
        device=settings.device,
        verify=options.verify,
    )
    app = WikiServer(index, settings, place.token).app()
    serve(app, place.host, place.port, token=place.token, finish_s=settings.finish_s)


if __name__ == "__main__":
    sys.exit(main())
