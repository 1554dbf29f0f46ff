"""Why a run ended, in files that outlive the processes which know it."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

from afm.errors import (
    ConfigError,
    EngineError,
    MissingExtraError,
    RewardError,
    SandboxUnavailableError,
    UsageError,
)
from afm.runs.atomic import replacing

FAILURES_FILE = "failures.jsonl"
"""One line for each episode that could not be finished, with its error; ``fatal`` ones ended the run."""
VERDICT_FILE = "failure.json"
"""Why the run was ended on purpose; shown by the launcher."""


_FATAL = (
    EngineError,
    ConfigError,
    UsageError,
    MissingExtraError,
    RewardError,
    SandboxUnavailableError,
)


def is_fatal(error: BaseException) -> bool:
    """Whether an error would meet every episode, or make training wrong, so that the run has to end at the first one."""
    return isinstance(error, _FATAL)


def record_failure(
    output_dir: str | Path | None,
    prompt: Any,
    error: BaseException,
    *,
    step: int = 0,
    episode: str = "",
    fatal: bool = True,
) -> None:
    """Append an episode's failure; several processes may write at once."""
    if output_dir is None:
        return
    row = {
        "step": step,
        "episode": episode,
        "fatal": fatal,
        "prompt": str(prompt),
        "error": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    with (Path(output_dir) / FAILURES_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def first_failure(output_dir: str | Path | None) -> str | None:
    """``Type: message`` of the first recorded failure that ended the run."""
    rows = _rows(Path(output_dir)) if output_dir is not None else []
    return next((f"{row['error']}: {row['message']}" for row in rows if row.get("fatal", True)), None)


def _rows(output_dir: Path) -> list[dict[str, Any]]:
    """The recorded failures; a last line that a kill cut off is left out."""
    path = output_dir / FAILURES_FILE
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


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


def forget_failures(output_dir: str | Path, step: int = 0) -> None:
    """Remove what an earlier start left, but for the failed episodes that the run went on without, up to ``step``."""
    (Path(output_dir) / VERDICT_FILE).unlink(missing_ok=True)
    rows = _rows(Path(output_dir))
    kept = [row for row in rows if not row.get("fatal", True) and row.get("step", 0) <= step]
    file = Path(output_dir) / FAILURES_FILE
    if kept:
        with replacing(file) as temporary:
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
            temporary.write_text("".join(lines), encoding="utf-8")
    else:
        file.unlink(missing_ok=True)
