"""The same promises are tested on every kind of sandbox that works here."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from afm.errors import SandboxUnavailableError
from afm.sandbox import open_sandbox

BACKENDS = ("zygote", "bubblewrap", "nsjail")


def _works(backend: str) -> str | None:
    async def attempt() -> None:
        sandbox = open_sandbox(backend)
        try:
            await sandbox.isolation()
        finally:
            await sandbox.close()

    try:
        asyncio.run(attempt())
    except SandboxUnavailableError as error:
        return str(error)
    return None


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each kind of sandbox in turn; only nsjail may be absent."""
    name = str(request.param)
    if name == "nsjail" and shutil.which("nsjail") is None:
        pytest.skip("nsjail is not installed: requirements/install-nsjail.sh")
    assert (trouble := _works(name)) is None, trouble
    return name
