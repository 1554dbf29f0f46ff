"""``python -m tool_servers.code [--config YAML] [--host H] [--port N]``: serve the sandbox over HTTP."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from afm.errors import AfmError, MissingExtraError, SandboxError
from afm.sandbox import Sandbox, open_sandbox
from afm.settings import load_settings
from tool_servers.code.settings import load_server_settings
from tool_servers.shared.access import check_exposure
from tool_servers.shared.serve import serve

_TOKEN = "CODE_SERVER_TOKEN"


def main() -> int:
    """Serve until told to stop. Exit status 0 then, 1 when it cannot serve, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m tool_servers.code",
        description=f"Serve the sandbox over HTTP. The token comes from {_TOKEN}.",
    )
    parser.add_argument("--config", type=Path, help="YAML, e.g. configs/servers/code.yaml")
    parser.add_argument("--host", help="address to listen on (SERVER_HOST; 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port, 0 for a free one (CODE_SERVER_PORT; 9002)")
    given = parser.parse_args()
    try:
        _serve(given.config, given.host, given.port)
    except AfmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(config: Path | None, host: str | None, port: int | None) -> None:
    for package in ("fastapi", "uvicorn"):
        if find_spec(package) is None:
            raise MissingExtraError(package, "servers")
    from tool_servers.code.app import CodeServer

    environment = load_settings()
    settings = load_server_settings(config)
    secret = environment.code_server_token
    token = secret.get_secret_value() if secret else None
    host = host or environment.server_host
    check_exposure(host, token, _TOKEN)
    sandbox = open_sandbox(**settings.sandbox.options() | {"max_parallel": settings.parallel()})
    app = CodeServer(sandbox, settings, token).app()
    port = environment.code_server_port if port is None else port
    serve(app, host, port, finish_s=settings.finish_s, prepare=lambda: _tried(sandbox))


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
