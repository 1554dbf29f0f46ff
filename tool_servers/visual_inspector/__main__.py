"""``python -m tool_servers.visual_inspector [--config YAML] [--host H] [--port N]``: look at pictures for agents."""

from __future__ import annotations

import sys

from tool_servers.shared.command import Given, ServerCommand
from tool_servers.shared.serve import serve

_PACKAGES = ("fastapi", "uvicorn", "PIL")


def main() -> int:
    """Serve until told to stop. Exit status 0 then, 1 when it cannot serve, 2 for wrong usage."""
    purpose = "Look at pictures for agents with a vision model."
    return ServerCommand("visual_inspector", purpose, _PACKAGES).run(_serve)


def _serve(given: Given) -> None:
    from tool_servers.visual_inspector.app import inspector_app
    from tool_servers.visual_inspector.vision import InspectorSettings

    settings = InspectorSettings.read(given.config)
    place = given.place()
    app = inspector_app(settings, given.environment, place.token)
    serve(app, place.host, place.port, token=place.token, finish_s=settings.finish_s)


if __name__ == "__main__":
    sys.exit(main())
