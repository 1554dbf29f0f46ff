"""Files of the published repository, for tests that hold ours against them: AFM_PUBLISHED_REPOSITORY names a clone of it."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from afm.presets import published

REPOSITORY = os.environ.get("AFM_PUBLISHED_REPOSITORY", "")
needs_repository = pytest.mark.skipif(
    not REPOSITORY, reason="AFM_PUBLISHED_REPOSITORY names no clone of the published repository"
)


@cache
def published_text(path: str) -> str:
    """A file at the revision that the facts are of."""
    place = f"{published().revision}:{path}"
    command = ["git", "-C", REPOSITORY, "show", place]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def lay_out(folder: Path, *paths: str) -> Path:
    """Write these files below ``folder``, unchanged, and return it."""
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(published_text(path), encoding="utf-8")
    return folder


def run(code: str, *arguments: object, **variables: str) -> str:
    """What a program of theirs prints, without a proxy and without our packages."""
    environment = os.environ | {"NO_PROXY": "*", "PYTHONPATH": ""} | variables
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
