"""A real page server as a process of its own, and a real web site to read, both on the loopback."""

from __future__ import annotations

import sqlite3
import zlib

import httpx
import pytest
from site_server import Site
from tool_server import ToolServer, ToolServerProcess, running

TOKEN = "a-long-random-token"


@pytest.fixture
def site():
    site = Site()
    yield site
    site.close()


@pytest.fixture
def another_site():
    site = Site()
    yield site
    site.close()


@pytest.fixture
def usual(tmp_path):
    """Variables of every server."""
    return {"WEB_SERVER_TOKEN": TOKEN, "WEB_CACHE": tmp_path / "cache.sqlite"}


@pytest.fixture
def start(tmp_path, usual):
    """Starts the server of this name with these settings and variables."""
    with running(ToolServer, tmp_path, TOKEN) as start:
        yield lambda name, settings=None, **own: start(name, settings=settings, **usual | own)


@pytest.fixture
def start_process(tmp_path, usual):
    """The same as a process of its own, with further words of its command line."""
    with running(ToolServerProcess, tmp_path, TOKEN) as start:
        yield lambda name, settings=None, *words, **own: start(name, *words, settings=settings, **usual | own)


@pytest.fixture
def spoil(tmp_path):
    """Puts this text in place of all that is cached."""

    def spoilt(text):
        with sqlite3.connect(tmp_path / "cache.sqlite") as store:
            assert store.execute("UPDATE texts SET value = ?", (zlib.compress(text.encode()),)).rowcount > 0

    return spoilt


@pytest.fixture
async def client():
    async with httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=600)) as client:
        yield client
