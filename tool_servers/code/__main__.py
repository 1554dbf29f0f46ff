"""``python -m tool_servers.code [--config YAML] [--host H] [--port N]``: serve the sandbox over HTTP."""

from __future__ import annotations

import sys

from afm.errors import SandboxError
from afm.sandbox import Sandbox, open_sandbox
from tool_servers.shared.command import Given, ServerCommand
from tool_servers.shared.serve import serve


def main() -> int:
    """Serve until told to stop. Exit status 0 then, 1 when it cannot serve, 2 for wrong usage."""
    return ServerCommand("code", "Serve the sandbox over HTTP.", ("fastapi", "uvicorn")).run(_serve)


def _serve(given: Given) -> None:
    from tool_servers.code.app import CodeServer
    from tool_servers.code.settings import load_server_settings

    settings = load_server_settings(given.config)
    place = given.place()
    sandbox = open_sandbox(**settings.sandbox.options() | {"max_parallel": settings.parallel()})
    app = CodeServer(sandbox, settings, place.token).app()
    serve(
        app,
        place.host,
        place.port,
        token=place.token,
        finish_s=settings.finish_s,
        prepare=lambda: _tried(sandbox),
    )


async def _tried(sandbox: Sandbox) -> None:
    """Run a program.

    Raises:
        SandboxError: None can run here; the message names what to install.
    """
    result = await sandbox.run("print(6 * 7)")
    if result.stdout != "42\n":
        raise SandboxError(f"the trial program printed {result.stdout!r} {result.stderr!r}, expected 42")


if __name__ == "__main__":
    sys.exit(main())
