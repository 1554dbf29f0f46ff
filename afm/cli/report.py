"""``afm report``, ``afm view``, ``afm cassette``: pages about runs, and the contents of a cassette."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.cli.options import file_argument, page_option, rows_file
from afm.errors import DataError, MissingExtraError, UsageError, no_such_file
from afm.terminal import plural

if TYPE_CHECKING:
    from afm.evaluation.viewer import EpisodeIndex
    from afm.evaluation.viewer.episodes import Decode


def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR",
            help="output_dir of `afm quickstart`, `afm eval`, `afm sft` or `afm rl`. Several evaluations are compared with "
            "the first.",
        ),
    ],
    out: Annotated[
        Path | None,
        page_option(
            "Page to write (.html) [default: report.html, or comparison.html for several, in the first RUN_DIR]."
        ),
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compare although settings other than the model differ.")
    ] = False,
    view_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of `afm view` in the links to episodes.")
    ] = 8765,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write a report as one self-contained HTML page.

    It shows scores, published scores, curves, failures and trajectories. The report is also written as Markdown (.md)
    and JSON (.json), in the same folder.

    Example: afm report runs/quickstart --open
    """
    from afm.configuration import describe_yaml

    for folder in run_dirs:
        if not folder.is_dir():
            what = f"is a file; afm view {shlex.quote(str(folder))} shows its episodes, if it holds any"
            if folder.suffix in (".yaml", ".yml"):
                what = describe_yaml(folder)
            raise UsageError(
                f"{folder}: {what if folder.exists() else no_such_file(folder, 'folder')}; expected the output_dir of a run or an evaluation"
            )
    if anyway and len(run_dirs) < 2:
        raise UsageError("--anyway goes with several runs: afm report BEFORE AFTER --anyway")
    from afm.evaluation.report import write_comparison, write_run_report

    if len(run_dirs) > 1:
        target = out or run_dirs[0] / "comparison.html"
        path = write_comparison(run_dirs, target, anyway=anyway, view_port=view_port)
    else:
        path = write_run_report(run_dirs[0], out or run_dirs[0] / "report.html", view_port=view_port)
    print(path)
    if not show:
        print(f"open {path.resolve().as_uri()} in a browser (--open does)", file=sys.stderr)
    else:
        typer.launch(path.resolve().as_uri())


_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def view(
    path: Annotated[Path, typer.Argument(help="Folder of a run, or a JSONL file of trajectories.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free port.")
    ] = 0,
    host: Annotated[
        str, typer.Option(help="Loopback address to listen on: 127.0.0.1, ::1 or localhost.")
    ] = "127.0.0.1",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Model folder whose tokenizer turns logged tokens into text [default: the model that the run names].",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    index: Annotated[
        Path | None, typer.Option(help="File of the index [default: .afm_view.sqlite in the folder].")
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write: static pages to share, without secrets. No server starts [default: start a server].",
            file_okay=False,
        ),
    ] = None,
    bundle_episodes: Annotated[
        int, typer.Option(min=1, help="Largest number of episodes that --bundle keeps.")
    ] = 2000,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Filter, search, read and compare episodes in a browser.

    The page follows a running job. Only this machine can open the page. From another one, choose a
    --port and use `ssh -L PORT:127.0.0.1:PORT HOST`.
    """
    from afm.evaluation.viewer import EpisodeIndex
    from afm.evaluation.viewer.index import episode_files

    if not path.exists():
        missing = no_such_file(path, "file or folder")
        raise UsageError(f"{path}: {missing}; expected episodes as JSONL, or a run's folder")
    if path.suffix in (".yaml", ".yml"):
        rows_file(path)
    episodes = EpisodeIndex(path, index or _place(path.resolve()))
    if bundle is not None:
        page = _write_bundle(episodes, bundle, bundle_episodes)
        if show:
            typer.launch(page.resolve().as_uri())
        return
    if host not in _LOOPBACK:
        raise UsageError(
            f"--host {host}: expected a loopback address ({', '.join(_LOOPBACK)}). "
            "From another machine, choose a --port and use `ssh -L PORT:127.0.0.1:PORT HOST`"
        )
    if not any(file.stat().st_size for file in episode_files(path)):
        what = "is empty" if path.is_file() else "no episodes below this folder yet"
        expected = "the output_dir of an evaluation, a distillation or `afm rl`, or a folder above it"
        print(f"{path}: {what}; the page shows what a job writes. Expected {expected}", file=sys.stderr)
    _serve(episodes, path if path.is_dir() else path.parent, host, port, tokenizer, show=show)


def _serve(
    episodes: EpisodeIndex, root: Path, host: str, port: int, tokenizer: Path | None, *, show: bool
) -> None:
    """Serve the page until Ctrl-C."""
    import asyncio

    try:
        import uvicorn
    except ImportError as error:
        raise MissingExtraError("uvicorn", "servers") from error
    from afm.evaluation.viewer.run_files import RunFiles
    from afm.evaluation.viewer.server import Follower, make_app
    from tool_servers.shared.command import Address

    follower = Follower(episodes)
    app = make_app(episodes, follower, RunFiles(root, _decoder(tokenizer)))
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning"))
    listener = Address(host, port, None).listen()
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


def _write_bundle(episodes: EpisodeIndex, out: Path, max_episodes: int) -> Path:
    """Write the bundle, print its page and what it lacks; returns the page."""
    from afm.evaluation.viewer.bundle import write_bundle

    for _ in episodes.refresh():
        pass
    left_out = write_bundle(episodes, out, _hider(), max_episodes=max_episodes)
    page = out / "index.html"
    print(page)
    for line in left_out:
        print(f"left out: {line}")
    return page


_PRIVATE_KEY = re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY.*?(?:-----END [A-Z ]+-----|\Z)", re.DOTALL)


def _hider() -> Callable[[str], str]:
    """Removes secrets from a text: values of this environment, and whatever looks like a key of a known service."""
    from afm.distill.filters.patterns import SECRETS
    from afm.tools.secrets import Secrets

    own = Secrets()

    def hide(text: str) -> str:
        text = _PRIVATE_KEY.sub("[secret]", own.hidden(text))
        for pattern in SECRETS:
            for begin, end in reversed(list(pattern.spans(text))):
                text = f"{text[:begin]}[secret]{text[end:]}"
        return text

    return hide


def _place(path: Path) -> Path:
    """In the folder of the episodes where that is writable, else in a temporary folder."""
    from afm.evaluation.viewer.index import DEFAULT_NAME

    folder = path if path.is_dir() else path.parent
    name = DEFAULT_NAME if path.is_dir() else f".{path.name}{DEFAULT_NAME}"
    if os.access(folder, os.W_OK):
        return folder / name
    return Path(tempfile.mkdtemp(prefix="afm-view-")) / name


def _decoder(folder: Path | None) -> Decode | None:
    if folder is None:
        return None
    from afm.models.tokenizer import ChatTokenizer

    return ChatTokenizer.load(folder).decode


_DAY_S = 86_400.0


def cassette(
    file: Annotated[Path, file_argument("Cassette: the SQLite file that `cassette` of a tools YAML names.")],
    max_age_days: Annotated[
        float, typer.Option(min=0.0, help="Days after which a call counts as old.")
    ] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a cassette of recorded tool calls holds.

    The command prints the number of calls, their age and the versions of each tool.
    """
    from afm.tools.cassette import Cassette, staleness

    if not file.stat().st_size:
        message = "is empty; expected the file that `cassette` of a tools YAML names, after a run with it"
        raise DataError(message, path=str(file))
    report = staleness(Cassette(file), max_age_days * _DAY_S)
    if as_json:
        print(json.dumps({tool: dataclasses.asdict(calls) for tool, calls in report.items()}))
        return
    if not report:
        print(f"{file}: no calls")
    for tool, calls in report.items():
        print(
            f"{tool}: {plural(calls.calls, 'call')} from {_date(calls.oldest)} to {_date(calls.newest)}, "
            f"{calls.outdated} older than {max_age_days:g} days, versions of the tool: {len(calls.versions)}"
        )


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")
