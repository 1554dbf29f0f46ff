"""``afm view``: a local page over episodes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from afm.evaluation.viewer.episode import Decode

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def view(
    path: Annotated[Path, typer.Argument(help="A run's folder, or a trajectory JSONL file.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on: 127.0.0.1, ::1 or localhost; others would show episodes to anyone."
        ),
    ] = "127.0.0.1",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Model folder whose tokenizer reads the tokens that RL logs.", exists=True, file_okay=False
        ),
    ] = None,
    index: Annotated[
        Path | None, typer.Option(help="Where the index is kept; by default beside the episodes.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Look at episodes in a browser: filter, search, read, compare; a running job is followed.

    The page is served to this machine only. From another one: `ssh -L PORT:127.0.0.1:PORT`.
    """
    import asyncio

    from afm.errors import MissingExtraError, UsageError

    if host not in _LOOPBACK:
        raise UsageError(
            f"--host {host}: episodes are shown to this machine only ({', '.join(_LOOPBACK)}); from another one: "
            "ssh -L PORT:127.0.0.1:PORT"
        )

    try:
        import uvicorn
    except ImportError as error:
        raise MissingExtraError("uvicorn", "servers") from error
    from afm.evaluation.viewer import EpisodeIndex
    from afm.evaluation.viewer.server import Follower, make_app

    found = EpisodeIndex(path, index or _place(path.resolve()))
    follower = Follower(found)
    app = make_app(found, follower, _decoder(tokenizer))
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning"))
    listener = server.config.bind_socket()
    named = f"[{host}]" if ":" in host else host
    address = f"http://{named}:{listener.getsockname()[1]}/"
    follower.start()
    print(f"{address}   (Ctrl-C ends it)", flush=True)
    if show:
        typer.launch(address)
    try:
        asyncio.run(server.serve(sockets=[listener]))
    except KeyboardInterrupt:
        pass
    finally:
        follower.stop()


def _place(path: Path) -> Path:
    """Beside the episodes where one may write, else in a temporary folder."""
    folder = path if path.is_dir() else path.parent
    name = ".afm_view.sqlite" if path.is_dir() else f".{path.name}.afm_view.sqlite"
    if os.access(folder, os.W_OK):
        return folder / name
    return Path(tempfile.mkdtemp(prefix="afm-view-")) / name


def _decoder(folder: Path | None) -> Decode | None:
    if folder is None:
        return None
    from afm.models.tokenizer import ChatTokenizer

    return ChatTokenizer.load(folder).decode
