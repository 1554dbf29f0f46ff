"""What ``TINY=1`` adds to the road: a Hub on this machine, servers for the tools, a model from random weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml

from afm.cli.recipes.wiki_server import environment, loopback_server, wiki_server
from afm.cli.road.fixtures import PAGES, WORLD_SEED
from afm.cli.road.hub_server import hub_server
from afm.cli.road.stages import Road
from afm.errors import ToolError
from afm.processes import tied_environment

_VOCABULARY, _HEADS = 1024, 4


@contextmanager
def serving(road: Road, stage: str, hub: Path) -> Iterator[None]:
    """What a stage talks to, on the loopback, while the block runs; its addresses are in the environment."""
    with ExitStack() as stack:
        if stage == "download":
            url = stack.enter_context(hub_server(hub / "repositories"))
            stack.enter_context(
                environment({"HF_ENDPOINT": url, "GITHUB_RAW_ENDPOINT": url, "HF_HUB_OFFLINE": "0"})
            )
        elif stage in ("rl", "eval") and road.agent.short == "mhqa":
            stack.enter_context(wiki_server(_index(hub), hub / "wiki_server.log"))
        elif stage in ("rl", "eval") and road.agent.short == "web":
            stack.enter_context(_web(hub))
        yield


@contextmanager
def _web(hub: Path) -> Iterator[None]:
    """A small web site, a search server over its pages, and a page reader that may read it."""
    from afm.datasets.encyclopaedia import Encyclopaedia, site_server

    site = site_server(Encyclopaedia(PAGES, seed=WORLD_SEED, brief=True))
    threading.Thread(target=site.serve_forever, daemon=True).start()
    place = f"127.0.0.1:{site.server_port}"
    settings = {
        "web_search": {"page_url": f"http://{place}/wiki/{{title}}"},
        "crawl_page": {"trusted": [place], "workers": 1},
    }
    variables = {
        "WEB_SEARCH_METHOD_TYPE": "local",
        "WEB_PAGE_STORE": str(hub / "world/corpus.jsonl"),
        "SERVER_HOST": "127.0.0.1",
    }
    ports = {"web_search": "WEBSEARCH_PORT", "crawl_page": "CRAWL_PAGE_PORT"}
    with ExitStack() as stack:
        stack.callback(site.server_close)
        stack.callback(site.shutdown)
        stack.enter_context(environment(variables))
        for name, port in ports.items():
            config = hub / f"{name}.yaml"
            config.write_text(yaml.safe_dump(settings[name]), encoding="utf-8")
            url = stack.enter_context(loopback_server(name, [f"--config={config}"], hub / f"{name}.log"))
            stack.enter_context(environment({port: url.rpartition(":")[2]}))
        yield


def _index(hub: Path) -> Path:
    """The search index of the generated encyclopaedia; an interrupted build is continued."""
    index = hub / "index"
    words = [sys.executable, "-P", "-m", "tool_servers.wiki_search.build", str(hub / "world/corpus.jsonl")]
    with (hub / "index.log").open("wb") as log:
        done = subprocess.run(
            [*words, f"--out={index}"], env=tied_environment(), stdout=log, stderr=log, check=False
        )
    if done.returncode != 0:
        raise ToolError(f"the search index was not built, status {done.returncode}; see {hub / 'index.log'}")
    return index


def make_start_model(road: Road) -> None:
    """A tokenizer of the SFT rows, and a model from random weights, if they are not there."""
    from afm.models.tiny import create_tiny_model, train_tokenizer

    if road.start.exists():
        return
    rows = json.loads((road.data / "sft" / f"{road.agent.name}_sft.json").read_text(encoding="utf-8"))
    texts = [text for row in rows for text in (row["instruction"], row["output"])]
    unfinished = road.start.with_name("start.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    train_tokenizer(texts, unfinished, vocab_size=_VOCABULARY, whole_tags=True)
    create_tiny_model(unfinished, unfinished, heads=_HEADS)
    unfinished.rename(road.start)
