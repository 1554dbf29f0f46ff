"""``afm serve``: one tool server, in the foreground."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Serve a tool to other machines.", no_args_is_help=True)


@app.callback()
def serve() -> None:
    """Keeps ``code`` a sub-command while it is the only one."""


@app.command()
def code(
    config: Annotated[
        Path | None, typer.Option(help="YAML, e.g. configs/servers/code.yaml.", exists=True, dir_okay=False)
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (SERVER_HOST).")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port, 0 for a free one (CODE_SERVER_PORT).", min=0, max=65535)
    ] = None,
) -> None:
    """Run programs that come by HTTP in this machine's sandbox, for code tools with `urls`.

    CODE_SERVER_TOKEN is asked of every request; without one the server listens on this machine only.
    """
    given = {"--config": config, "--host": host, "--port": port}
    options = [text for name, value in given.items() if value is not None for text in (name, str(value))]
    os.execv(sys.executable, [sys.executable, "-m", "tool_servers.code", *options])
