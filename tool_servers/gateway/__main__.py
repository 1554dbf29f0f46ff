"""``python -m tool_servers.gateway [--upstream URL] [--log FILE] [--config YAML] [--host H] [--port N]``: record a team."""

from __future__ import annotations

import sys
from pathlib import Path

from tool_servers.shared.command import Given, ServerCommand
from tool_servers.shared.serve import serve

_PACKAGES = ("fastapi", "uvicorn")
_LOG = Path("runs/gateway/events.jsonl")


def main() -> int:
    """Serve until told to stop. Exit status 0 then, 1 when it cannot serve, 2 for wrong usage."""
    purpose = "Pass calls of OpenAI clients on to any endpoint and record them."
    command = ServerCommand("gateway", purpose, _PACKAGES)
    command.parser.add_argument("--upstream", help="endpoint behind it, with /v1 (GATEWAY_UPSTREAM_URL)")
    command.parser.add_argument("--log", type=Path, default=_LOG, help=f"event log ({_LOG})")
    return command.run(_serve)


def _serve(given: Given) -> None:
    from afm.distill.gateway import CallLog
    from tool_servers.gateway.app import Gateway
    from tool_servers.gateway.settings import GatewaySettings, open_routes

    settings = GatewaySettings.read(given.config)
    place = given.place()
    routes = open_routes(settings, given.environment, given.options.upstream)
    with CallLog(given.options.log) as log:
        app = Gateway(settings, routes, log, place.token).app()
        serve(app, place.host, place.port, token=place.token, finish_s=settings.finish_s)


if __name__ == "__main__":
    sys.exit(main())
