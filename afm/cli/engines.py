"""Run a training engine as a process of its own, and follow it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from afm.errors import EngineError
from afm.processes import tied_environment

Progress = Callable[[str, int, int | None], None]
"""Receives what is counted, how many are done, and how many there are (``None``: unknown)."""


def run_engine(command: str, *arguments: str, folder: Path, progress: Progress) -> None:
    """Run ``afm COMMAND`` until it ends; it ends when this process does.

    Args:
        folder: Its output folder, where its log is.

    Raises:
        EngineError: It ended with another status than 0.
    """
    words = [sys.executable, "-P", "-m", "afm.cli.main", command, *arguments]
    with subprocess.Popen(words, env=tied_environment()) as child:
        status = _wait(child, folder, progress)
    if status != 0:
        raise EngineError(
            f"`afm {command}` ended with status {status}; see {folder / 'training.log'}. "
            "Run the same quickstart again to continue from what is finished."
        )


def _wait(child: subprocess.Popen[bytes], folder: Path, progress: Progress) -> int:
    try:
        while True:
            try:
                return child.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                _count_steps(folder / "trainer_log.jsonl", progress)
    except KeyboardInterrupt:  # the child got it, too, and leaves what is finished
        child.wait()
        raise


def _count_steps(log: Path, progress: Progress) -> None:
    if not log.exists():
        return
    whole = [
        line for line in log.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]
    if whole:
        last = json.loads(whole[-1])
        progress("training steps", last["current_steps"], last["total_steps"])
