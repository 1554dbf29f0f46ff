"""``afm rl``: reinforcement learning with verl, as a process of its own."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from afm.errors import MissingExtraError
from afm.processes import tied_environment

LAUNCHER = "verl_ext.launcher"


def rl(
    config: Annotated[
        Path,
        typer.Argument(
            help="YAML of the run, for example configs/tiny/rl/math.yaml.", exists=True, dir_okay=False
        ),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, for example seed=1 verl.trainer.save_freq=5.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved command, check it, start nothing.")
    ] = False,
) -> None:
    """Train an agent by reinforcement learning; continues from the last checkpoint if there is one."""
    if importlib.util.find_spec("verl") is None:
        raise MissingExtraError("verl", "rl")
    options = ["--dry-run"] if dry_run else []
    words = [sys.executable, "-P", "-m", LAUNCHER, *options, str(config), *(overrides or [])]
    raise typer.Exit(run_words(words))


def run_words(words: list[str]) -> int:
    """Run ``words`` as a process, hand signals on, and return the exit status."""
    with subprocess.Popen(words, env=tied_environment()) as process:
        # A terminal sends Ctrl-C to both: the launcher stops the trainer, this process only waits for it.
        before = {
            signal.SIGINT: signal.signal(signal.SIGINT, lambda number, frame: None),
            signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: process.terminate()),
        }
        try:
            status = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return status if status >= 0 else 128 - status
