"""The web agent on a generated encyclopaedia: searched, served over HTTP, read and followed by its links."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import yaml

from afm.agents import load_agent
from afm.datasets.encyclopaedia import Encyclopaedia, site_server
from afm.datasets.encyclopaedia.site import write_corpus
from afm.models.scripted import ScriptedModel
from afm.rollout import run_episode
from afm.tools import load_tools
from afm.trajectory.record import StopReason

ROOT = Path(__file__).parents[3]
WORLD = Encyclopaedia(200, seed=5)


@pytest.fixture
def encyclopaedia():
    server = site_server(WORLD)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


async def test_two_hops_by_search_and_by_a_link(start, encyclopaedia, tmp_path, monkeypatch):
    corpus = tmp_path / "corpus.jsonl"
    write_corpus(WORLD, corpus)
    page_url = f"http://{encyclopaedia}/wiki/{{title}}"
    search = start("web_search", {"page_url": page_url}, WEB_PAGE_STORE=corpus)
    crawl = start("crawl_page", {"trusted": [encyclopaedia], "workers": 1})
    monkeypatch.setenv("WEB_SERVER_TOKEN", "a-long-random-token")
    file = yaml.safe_load((ROOT / "configs/tiny/tools/search.yaml").read_text())
    for entry, server in zip(file["tools"], (search, crawl), strict=True):
        entry["config"]["urls"] = [server.url]
    tools = load_tools(file)
    first = WORLD.page(120)
    link = first.links[0]
    second = next(
        page for page in map(WORLD.page, range(200)) if page.title == first.text[link.start : link.end]
    )
    observed = []

    def script(text):
        """Searches, reads the first hit, follows its first link, answers."""
        observed.append(text)
        if len(observed) == 1:
            return f"<think>search</think><web_search>{first.title}</web_search>"
        if len(observed) == 2:
            return f"<think>read</think><crawl_page>{address}</crawl_page>"
        if len(observed) == 3:
            followed = re.findall(r"\]\((http[^)]+/wiki/[^)]+)\)", text)[0]
            return f"<think>follow</think><crawl_page>[next]({followed})</crawl_page>"
        return "<think>done</think><answer>x</answer>"

    address = page_url.replace("{title}", first.title.replace(" ", "_"))
    episode = await run_episode(load_agent("web"), ScriptedModel(script), tools, f"Who is {first.title}?")
    for tool in tools.values():
        await tool.close()
    assert episode.stop is StopReason.ANSWER
    hits, page, next_page = (call.observation for call in episode.calls)
    assert hits.startswith(f"[1] {first.title}\n{address}\n")
    assert all(word in page for word in first.text.split()[:3])
    assert next_page.startswith(f"{second.title}\n")
    assert [call.ok for call in episode.calls] == [True] * 3
