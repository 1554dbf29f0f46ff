"""A server that speaks the Hub's protocol, with the faults that a network and a Hub have."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest

REVISION = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_a_secret_of_a_test"


class Hub:
    """Repositories behind ``/resolve`` addresses, which redirect to another host where files are large, with ranges.

    Attributes:
        repositories: Files by repository, at :data:`REVISION`; a model's name begins with ``models/``.
        commits: Further states of a repository: files by commit.
        main: The commit of the main branch, where it is another one.
        github: Raw files of GitHub: content by ``owner/name/commit/path``.
        gated: Repositories that only a token in ``tokens`` may read.
        sent: File, first byte and number of bytes of each answer.
        asked: Path of each request.
        cut_at: The connection breaks after so many bytes of an answer.
        failures: So many of the next requests to addresses that begin with ``failing`` are answered with status ``failure``.
        ranges: Whether the server knows them.
        pause_s: Between pieces of 256 KiB.
    """

    def __init__(self):
        self.repositories, self.commits, self.main, self.github = {}, {}, {}, {}
        self.gated, self.tokens = set(), set()
        self.sent, self.asked, self.header_names = [], [], []
        self.cut_at, self.ranges, self.pause_s = None, True, 0.0
        self.failures, self.failing, self.failure = 0, "", 500
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                path = urlsplit(self.path).path.strip("/")
                hub.asked.append(path)
                hub.header_names.append((self.path, {name.lower() for name in self.headers}))
                if hub.failures and path.startswith(hub.failing):
                    hub.failures -= 1
                    self._answer(hub.failure, b"try again", {"Retry-After": 1})
                elif unquote(path) in hub.github:
                    self._send(unquote(path), hub.github[unquote(path)])
                elif path.startswith("store/"):
                    repository, _, rest = path.removeprefix("store/").partition("/-/")
                    commit, _, name = rest.partition("/")
                    self._send(name, hub.files(repository, commit)[unquote(name)])
                elif found := re.fullmatch(
                    r"api/(datasets|models)/([^/]+/[^/]+)(?:/revision/([^/]+))?", path
                ):
                    self._describe(*found.groups())
                elif found := re.fullmatch(r"(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                    self._resolve(*found.groups())
                else:
                    self._answer(404, b"no such address")

            def _describe(self, kind, repository, revision):
                repository = repository if kind == "datasets" else f"models/{repository}"
                if self._unknown(repository):
                    return
                commit = hub.commit(repository, revision)
                if commit is None:
                    self._answer(404, b"Invalid rev id", {"X-Error-Code": "RevisionNotFound"})
                    return
                body = hub.described(repository, hub.files(repository, commit)) | {"sha": commit}
                self._answer(200, json.dumps(body).encode())

            def _resolve(self, kind, repository, revision, name):
                repository = repository if kind else f"models/{repository}"
                if self._refused(repository):
                    return
                commit = hub.commit(repository, revision)
                content = (hub.files(repository, commit) or {}).get(unquote(name))
                if content is None:
                    self._answer(404, b"Entry not found", {"X-Error-Code": "EntryNotFound"})
                    return
                headers = {
                    "X-Repo-Commit": commit,
                    "X-Linked-Size": len(content),
                    "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                    "Location": f"http://localhost:{hub.port}/store/{repository}/-/{commit}/{name}",
                }
                self._answer(302, b"", headers)

            def _refused(self, repository):
                """What is gated may be listed, but not fetched."""
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                if repository in hub.gated and token not in hub.tokens:
                    self._answer(403, b"Access is restricted", {"X-Error-Code": "GatedRepo"})
                    return True
                return self._unknown(repository)

            def _unknown(self, repository):
                if repository in hub.repositories:
                    return False
                body = json.dumps({"error": "Repository not found"}).encode()
                self._answer(401, body, {"X-Error-Code": "RepoNotFound"})
                return True

            def _answer(self, status, body, headers=None):
                self.send_response(status)
                for name, value in ({"Content-Length": len(body)} | (headers or {})).items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(body)

            def _send(self, name, content):
                asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
                start = int(asked[1]) if asked and hub.ranges else 0
                body = content[start : None if hub.cut_at is None else start + hub.cut_at]
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(content) - start))
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
                self.end_headers()
                hub.sent.append((name, start, len(body)))
                for begin in range(0, len(body), 256 << 10):
                    self.wfile.write(body[begin : begin + (256 << 10)])
                    time.sleep(hub.pause_s)
                self.close_connection = True

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_):
                """Clients of these tests are killed."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def commit(self, repository, revision):
        """What a revision names; ``None`` when there is no such revision."""
        if revision in (None, "main"):
            return self.main.get(repository, REVISION)
        known = {REVISION, *self.commits.get(repository, {})}
        return revision if revision in known else None

    def files(self, repository, commit):
        """The files of a repository at a commit."""
        return self.commits.get(repository, {}).get(commit) or self.repositories.get(repository)

    def described(self, repository, files):
        """What the Hub's API says about them."""
        siblings = [
            {
                "rfilename": name,
                "size": len(content),
                "blobId": hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest(),
            }
            | ({} if name == "README.md" else {"lfs": lfs(content)})
            for name, content in files.items()
        ]
        return {"id": repository, "private": False, "tags": [], "siblings": siblings}

    def close(self):
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


def lfs(content):
    """How the Hub's API describes a large file."""
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}


@pytest.fixture
def hub():
    """A Hub without repositories."""
    hub = Hub()
    yield hub
    hub.close()


@pytest.fixture
def hub_here(hub, monkeypatch):
    """This process downloads from ``hub``; returns what points it elsewhere. The Hub's package reads its address when it is imported."""
    constants = pytest.importorskip("huggingface_hub.constants")

    def point(endpoint):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )

    point(f"http://127.0.0.1:{hub.port}")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    return point


@pytest.fixture
def hub_environment(hub, tmp_path):
    """An environment whose Hub is ``hub``."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return environment | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.port}",
        "GITHUB_RAW_ENDPOINT": f"http://127.0.0.1:{hub.port}",
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(tmp_path / "home"),
        "NO_PROXY": "127.0.0.1,localhost",
    }
