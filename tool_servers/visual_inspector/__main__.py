"""``python -m tool_servers.visual_inspector [--config YAML] [--host H] [--port N]``: look at pictures for agents."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from afm.errors import AfmError, MissingExtraError
from afm.settings import load_settings
from tool_servers.shared.access import check_exposure
from tool_servers.shared.place import TOKEN_VARIABLE, web_token
from tool_servers.shared.serve import serve
from tool_servers.visual_inspector.settings import load_inspector_settings


def main() -> int:
    """Serve until told to stop. Exit status 0 then, 1 when it cannot serve, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m tool_servers.visual_inspector",
        description=f"Look at pictures for agents with a vision model. The token comes from {TOKEN_VARIABLE}.",
    )
    parser.add_argument("--config", type=Path, help="YAML, e.g. configs/servers/visual_inspector.yaml")
    parser.add_argument("--host", help="address to listen on (SERVER_HOST; 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port, 0 for a free one (VISUAL_INSPECTOR_PORT; 9003)")
    given = parser.parse_args()
    try:
        _serve(given.config, given.host, given.port)
    except AfmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(config: Path | None, host: str | None, port: int | None) -> None:
    for package in ("fastapi", "uvicorn", "PIL"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "servers")
    from tool_servers.visual_inspector.app import inspector_app

    environment = load_settings()
    settings = load_inspector_settings(config)
    token = web_token(environment)
    host = host or environment.server_host
    check_exposure(host, token, TOKEN_VARIABLE)
    app = inspector_app(settings, environment, token)
    serve(app, host, environment.visual_inspector_port if port is None else port, finish_s=settings.finish_s)


if __name__ == "__main__":
    sys.exit(main())
