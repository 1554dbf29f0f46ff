"""What ``TINY=1`` adds to the road: a Hub on this machine, servers for the tools, a model from random weights."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml

from afm.cli.recipes import environment, loopback_server, wiki_server
from afm.cli.road_fixtures import PAGES, WORLD_SEED
from afm.cli.road_stages import Road
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


_API = re.compile(r"/api/datasets/([^/]+/[^/]+)(?:/revision/[^/]+)?")
_RESOLVED = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/[^/]+/(.+)")
_RANGE = re.compile(r"bytes=(\d+)-")


class _HubHandler(BaseHTTPRequestHandler):
    """Answers of a Hub whose repositories are the folders of ``folder``; a subclass sets it."""

    folder: Path
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := _API.fullmatch(path):
            return self._describe(self.folder / found[1])
        resolved = _RESOLVED.fullmatch(path)
        file = self.folder / (f"{resolved[1]}/{resolved[2]}" if resolved else path.lstrip("/"))
        if not file.resolve().is_relative_to(self.folder.resolve()) or not file.is_file():
            return self._send(404, b"Entry not found", {"X-Error-Code": "EntryNotFound"})
        content = file.read_bytes()
        begin = _RANGE.fullmatch(self.headers.get("Range", ""))
        start = int(begin[1]) if begin else 0
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        if resolved:
            headers["X-Repo-Commit"] = _commit(self.folder / resolved[1])
        if begin:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self._send(206 if begin else 200, content[start:], headers)

    def _describe(self, repository: Path) -> None:
        if not repository.is_dir():
            return self._send(404, b"Repository not found", {"X-Error-Code": "RepoNotFound"})
        files = [_described(path, repository) for path in _files(repository)]
        name = repository.relative_to(self.folder).as_posix()
        body = {"id": name, "private": False, "tags": [], "siblings": files, "sha": _commit(repository)}
        return self._send(200, json.dumps(body).encode(), {})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Requests are not of interest."""


@contextmanager
def hub_server(folder: Path) -> Iterator[str]:
    """Serve ``folder/OWNER/NAME`` while the block runs: as data sets of the Hub, and below ``/OWNER/NAME/COMMIT/`` as GitHub does.

    Yields:
        The address, for ``HF_ENDPOINT`` and ``GITHUB_RAW_ENDPOINT``.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_HubHandler,), {"folder": folder}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _files(repository: Path) -> list[Path]:
    return sorted(path for path in repository.rglob("*") if path.is_file())


def _described(path: Path, repository: Path) -> dict[str, object]:
    """A file as the Hub's API lists it, large files and others alike."""
    content = path.read_bytes()
    lfs = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()
    return {
        "rfilename": path.relative_to(repository).as_posix(),
        "size": len(content),
        "blobId": blob,
        "lfs": lfs,
    }


def _commit(repository: Path) -> str:
    """Forty hexadecimal digits that change with the files."""
    seen = hashlib.sha1(usedforsecurity=False)
    for path in _files(repository):
        seen.update(path.relative_to(repository).as_posix().encode() + path.read_bytes())
    return seen.hexdigest()
