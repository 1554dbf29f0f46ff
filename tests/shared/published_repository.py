"""Files of the published repository, for tests that hold ours against them: AFM_PUBLISHED_REPOSITORY names a clone of it."""

import os
import subprocess
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
