"""Why a run ended, in files that outlive the processes which know it."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

FAILURES_FILE = "failures.jsonl"
"""One line for each episode that could not be finished."""
VERDICT_FILE = "failure.json"
"""Why the run was ended on purpose; shown by the launcher."""


def record_failure(output_dir: str | Path | None, prompt: Any, error: BaseException) -> None:
    """Append an episode's failure; several processes may write at once."""
    if output_dir is None:
        return
    row = {
        "prompt": str(prompt),
        "error": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    with (Path(output_dir) / FAILURES_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def first_failure(output_dir: str | Path | None) -> str | None:
    """``Type: message`` of the first recorded failure."""
    path = Path(output_dir) / FAILURES_FILE if output_dir is not None else None
    if path is None or not path.exists():
        return None
    with path.open(encoding="utf-8") as file:
        line = file.readline()
    if not line.endswith("\n"):
        return None
    row = json.loads(line)
    return f"{row['error']}: {row['message']}"


def write_verdict(output_dir: str | Path | None, error: BaseException) -> None:
    """Leave the reason of an intended end for the launcher."""
    if output_dir is None:
        return
    row = {"error": type(error).__name__, "message": str(error)}
    (Path(output_dir) / VERDICT_FILE).write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")


def read_verdict(output_dir: str | Path) -> str | None:
    """The message left by :func:`write_verdict`."""
    path = Path(output_dir) / VERDICT_FILE
    return json.loads(path.read_text(encoding="utf-8"))["message"] if path.exists() else None


def forget_failures(output_dir: str | Path) -> None:
    """Remove what an earlier start left."""
    for name in (FAILURES_FILE, VERDICT_FILE):
        (Path(output_dir) / name).unlink(missing_ok=True)
