"""What tests of several commands share."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def kill_when() -> Callable[..., None]:
    """Starts a job and ends it by ``kill -9`` once something is reached."""

    def kill(command: list[str], reached: Callable[[], bool], **options: Any) -> None:
        with subprocess.Popen(command, cwd=ROOT, **options) as job:
            deadline = time.monotonic() + 600
            while not reached():
                assert job.poll() is None, f"the job ended with {job.returncode} too early"
                assert time.monotonic() < deadline
                time.sleep(0.05)
            job.send_signal(signal.SIGKILL)

    return kill
