"""``afm data download``: data sets and models from the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.errors import DataError, UsageError, suggestion

if TYPE_CHECKING:
    from afm.datasets.hub_sets import HubSets

_FOLDER = "data"


def download(
    sets: Annotated[
        str, typer.Argument(help="YAML of sets, or the name of a shipped one: web_agent, benchmarks ...")
    ],
    out: Annotated[Path, typer.Option(help="Folder; every set gets one of its name in it.")],
    only: Annotated[
        list[str] | None, typer.Option(metavar="SET", help="This set alone; may be given several times.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Optional sets, too.")] = False,
    pin: Annotated[
        bool,
        typer.Option(
            "--pin", help="Ask the Hub for the newest state and pin that, also where a set is pinned already."
        ),
    ] = False,
    lock: Annotated[
        Path | None, typer.Option(help="Where sets are pinned; by default OUT/download.lock.json.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it takes, fetch nothing.")] = False,
) -> None:
    """Fetch data sets and models (HF_ENDPOINT names a mirror, HF_TOKEN a token; GITHUB_RAW_ENDPOINT a mirror of GitHub's files).

    Killed or cut off, the same command goes on. The first download of a set pins it: commit, size and checksum of every file.
    From then on the lock decides what is fetched, and any difference from it is an error.
    """
    from afm.cli.progress import ProgressView
    from afm.datasets.download import plan, run
    from afm.datasets.hub import size_told

    chosen = given_sets(sets).chosen(only or [], everything=everything)
    view = ProgressView()
    planned = plan(chosen, out, lock=lock, pin=pin)
    for one in planned.sets:
        view.line(one.told())
    view.line(f"{out}: {size_told(planned.bytes_missing)} to fetch")
    planned.check_space()
    failed = planned.refused
    if not dry_run:
        failed = run(planned, view.update, lock=lock)
    if failed:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in failed.items())
        raise DataError(f"{len(failed)} of {len(chosen)} sets could not be had:{reasons}")
    if not dry_run:
        view.line(f"{out}: {len(chosen)} sets are here and checked")


def given_sets(name: str) -> HubSets:
    """The sets of a YAML, or of the shipped one of that name.

    Raises:
        UsageError: There is neither.
        ConfigError: The YAML is wrong.
    """
    from afm.cli.project import configs_folder
    from afm.datasets.hub_sets import read_hub_sets

    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return read_hub_sets(path)
    folder = configs_folder() / _FOLDER
    shipped = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    if name not in shipped:
        raise UsageError(f"{name}: no YAML and no shipped list of sets; {suggestion(name, shipped)}")
    return read_hub_sets(shipped[name])
