"""The same promises are tested on every kind of sandbox that works here."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afm.sandbox import open_sandbox

BACKENDS = ("zygote", "bubblewrap", "nsjail")


async def _attempt(backend: str) -> None:
    sandbox = open_sandbox(backend)
    try:
        await sandbox.isolation()
    finally:
        await sandbox.close()


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each kind of sandbox in turn; only nsjail may be absent."""
    name = str(request.param)
    if name == "nsjail" and shutil.which("nsjail") is None:
        pytest.skip("nsjail is not installed: requirements/install-nsjail.sh")
    asyncio.run(_attempt(name))
    return name


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    """Puts a shell script, in which REAL is the program's path, in front of a program for every user; gives its path."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)

        def make(program: str, script: str) -> str:
            path = Path(folder, program)
            path.write_text(f"#!/bin/sh\n{script.replace('REAL', shutil.which(program) or '')}\n")
            path.chmod(0o755)
            monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
            return str(path)

        yield make
