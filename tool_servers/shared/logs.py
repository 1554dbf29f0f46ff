"""A server's log file, renamed and begun anew when it has grown; no line is lost and no second process is needed."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

LOG_VARIABLE = "AFM_SERVER_LOG"
"""``BYTES:PATH``, set by whoever sent standard output and errors of this process to ``PATH``."""

_KEPT = 3
_LOOK_S = 1.0


def follow_log() -> None:
    """Keep the file that :data:`LOG_VARIABLE` names below its size; nothing to do without it."""
    told = os.environ.pop(LOG_VARIABLE, None)
    if told is None:
        return
    most, _, path = told.partition(":")
    threading.Thread(target=_followed, args=(Path(path), int(most)), name="log", daemon=True).start()


def _followed(path: Path, max_bytes: int) -> None:
    while True:
        time.sleep(_LOOK_S)
        if os.fstat(1).st_size > max_bytes:
            renewed(path)


def renewed(path: Path) -> None:
    """Number the old files, ``path.1`` being the youngest, and go on in a new one."""
    try:
        for number in range(_KEPT, 1, -1):
            older = path.with_name(f"{path.name}.{number - 1}")
            if older.exists():
                older.replace(path.with_name(f"{path.name}.{number}"))
        path.replace(path.with_name(f"{path.name}.1"))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        print(f"log {path}: cannot be renewed: {error}", file=sys.stderr)
        return
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
