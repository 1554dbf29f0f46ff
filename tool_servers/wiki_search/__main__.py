"""``python -m tool_servers.wiki_search --index FOLDER``: serve an index over HTTP."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from afm.errors import AfmError, ConfigError, MissingExtraError
from afm.settings import load_settings
from tool_servers.shared.access import check_exposure
from tool_servers.shared.serve import serve
from tool_servers.wiki_search.settings import load_server_settings

_TOKEN = "WIKI_SERVER_TOKEN"
_PORT = 8000


def main() -> int:
    """Serve until told to stop. Exit status 0 then, 1 when it cannot serve, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m tool_servers.wiki_search",
        description=f"Serve an index made by `afm serve wiki build`. The token comes from {_TOKEN}.",
    )
    parser.add_argument("--config", type=Path, help="YAML, e.g. configs/servers/wiki.yaml")
    parser.add_argument("--index", type=Path, help="folder of the index")
    parser.add_argument("--engine", choices=("auto", "bm25", "dense", "hybrid"))
    parser.add_argument("--host", help="address to listen on (SERVER_HOST; 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port, 0 for a free one (that of WIKI_RAG_SERVER_URL; 8000)")
    parser.add_argument("--verify", action="store_true", help="compare the checksum of every byte first")
    given = parser.parse_args()
    try:
        _serve(given)
    except AfmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(given: argparse.Namespace) -> None:
    for package in ("starlette", "uvicorn", "numpy"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "servers")
    from tool_servers.wiki_search.app import WikiServer
    from tool_servers.wiki_search.index import open_index

    environment = load_settings()
    settings = load_server_settings(given.config)
    folder = given.index or settings.index
    if folder is None:
        raise ConfigError("no index given; name its folder with --index, or as `index` in the YAML")
    secret = environment.wiki_server_token
    token = secret.get_secret_value() if secret else None
    host = given.host or environment.server_host
    check_exposure(host, token, _TOKEN)
    index = open_index(
        folder,
        given.engine or settings.engine,
        model=settings.model,
        device=settings.device,
        verify=given.verify,
    )
    port = given.port if given.port is not None else urlsplit(environment.wiki_rag_server_url).port or _PORT
    serve(WikiServer(index, settings, token).app(), host, port, finish_s=settings.finish_s)


if __name__ == "__main__":
    sys.exit(main())
