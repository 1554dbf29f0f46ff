"""Web servers, in this process and in separate processes, and an encyclopaedia to read."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest
import yaml
from tool_server import ToolServer, ToolServerProcess, running

from afm.datasets.encyclopaedia import Encyclopaedia, site_server, write_corpus
from afm.tools import load_tools

ROOT = Path(__file__).parents[3]
TOKEN = "a-long-random-token"


@pytest.fixture
def usual(tmp_path):
    """Variables of every server."""
    return {"WEB_SERVER_TOKEN": TOKEN, "WEB_CACHE": tmp_path / "cache.sqlite"}


@pytest.fixture
def start(tmp_path, usual):
    """Start servers by name with these settings and variables."""
    with running(ToolServer, tmp_path, TOKEN) as start:
        yield lambda name, settings=None, **own: start(name, settings=settings, **usual | own)


@pytest.fixture
def start_process(tmp_path, usual):
    """Start servers in separate processes, with further command line arguments."""
    with running(ToolServerProcess, tmp_path, TOKEN) as start:
        yield lambda name, settings=None, *words, **own: start(name, *words, settings=settings, **usual | own)


@pytest.fixture
async def client():
    async with httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=600)) as client:
        yield client


@pytest.fixture(scope="session")
def encyclopaedia():
    return Encyclopaedia(200, seed=5)


@pytest.fixture
def page_url(encyclopaedia):
    """Serve the encyclopaedia; yield the address of its pages."""
    server = site_server(encyclopaedia)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/wiki/{{title}}"
    server.shutdown()
    server.server_close()


@pytest.fixture
async def tools(start, encyclopaedia, page_url, tmp_path, monkeypatch):
    """Load the tools of ``tools.yaml``, whose servers search the encyclopaedia and read its pages."""
    write_corpus(encyclopaedia, tmp_path / "corpus.jsonl")
    search = start("web_search", {"page_url": page_url}, WEB_PAGE_STORE=tmp_path / "corpus.jsonl")
    crawl = start("crawl_page", {"trusted": [page_url.split("/")[2]], "workers": 1})
    monkeypatch.setenv("WEB_SERVER_TOKEN", TOKEN)
    file = yaml.safe_load((ROOT / "configs/tiny/tools/search.yaml").read_text())
    for entry, server in zip(file["tools"], (search, crawl), strict=True):
        entry["config"]["urls"] = [server.url]
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump(file))
    loaded = load_tools(file)
    yield loaded
    for tool in loaded.values():
        await tool.close()
