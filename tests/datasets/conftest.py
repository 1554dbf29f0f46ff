"""A server that speaks the Hub's protocol, with the faults that a network and a Hub have."""

import hashlib
import json
import os
import re
from urllib.parse import quote, unquote, urlsplit

import pytest
from site_server import Site

REVISION = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_a_secret_of_a_test"


class Hub(Site):
    """Repositories behind ``/resolve`` addresses, which redirect to another host where files are large, with ranges.

    Attributes:
        repositories: Files by repository, at :data:`REVISION`; a model's name begins with ``models/``.
        commits: Further states of a repository: files by commit.
        main: The commit of the main branch, where it is another one.
        github: Raw files of GitHub: content by ``owner/name/commit/path``.
        gated: Repositories that only a token in ``tokens`` may read; what is gated may be listed, but not fetched.
        sent: File, first byte and number of bytes of each answer.
        cut_at: The connection breaks after so many bytes of an answer.
        failures: So many of the next requests to addresses that begin with ``failing`` are answered with status ``failure``.
        ranges: Whether the server knows them.
    """

    def __init__(self):
        super().__init__()
        self.repositories, self.commits, self.main, self.github = {}, {}, {}, {}
        self.gated, self.tokens, self.sent = set(), set(), []
        self.cut_at, self.ranges = None, True
        self.failures, self.failing, self.failure = 0, "", 500

    def page(self, path):
        return lambda handler: self._reply(handler, unquote(urlsplit(path).path.strip("/")))

    def _reply(self, handler, path):
        if self.failures and path.startswith(self.failing):
            self.failures -= 1
            answer(handler, self.failure, b"try again", {"Retry-After": 1})
        elif path in self.github:
            self._send(handler, path, self.github[path])
        elif found := re.fullmatch(r"store/(.+)/-/(\w+)/(.+)", path):
            repository, commit, name = found.groups()
            self._send(handler, name, self.files(repository, commit)[name])
        elif found := re.fullmatch(r"api/(datasets|models)/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self._describe(handler, *found.groups())
        elif found := re.fullmatch(r"(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(handler, *found.groups())
        else:
            answer(handler, 404, b"no such address")

    def _describe(self, handler, kind, repository, revision):
        repository = repository if kind == "datasets" else f"models/{repository}"
        commit = self.commit(repository, revision)
        if repository not in self.repositories:
            answer(handler, 401, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"})
        elif commit is None:
            answer(handler, 404, b"Invalid rev id", {"X-Error-Code": "RevisionNotFound"})
        else:
            body = self.described(repository, self.files(repository, commit)) | {"sha": commit}
            answer(handler, 200, json.dumps(body).encode())

    def _resolve(self, handler, kind, repository, revision, name):
        repository = repository if kind else f"models/{repository}"
        token = handler.headers.get("Authorization", "").removeprefix("Bearer ")
        commit = self.commit(repository, revision)
        content = (self.files(repository, commit) or {}).get(name)
        if repository in self.gated and token not in self.tokens:
            answer(handler, 403, b"Access is restricted", {"X-Error-Code": "GatedRepo"})
        elif content is None:
            answer(handler, 404, b"Entry not found", {"X-Error-Code": "EntryNotFound"})
        else:
            headers = {
                "X-Repo-Commit": commit,
                "X-Linked-Size": len(content),
                "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                "Location": f"http://localhost:{self.port}/store/{repository}/-/{commit}/{quote(name)}",
            }
            answer(handler, 302, b"", headers)

    def _send(self, handler, name, content):
        asked = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        start = int(asked[1]) if asked and self.ranges else 0
        body = content[start : None if self.cut_at is None else start + self.cut_at]
        self.sent.append((name, start, len(body)))
        headers = {"Content-Length": len(content) - start}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        answer(handler, 206 if start else 200, body, headers)
        handler.close_connection = True

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
        """Return the API's description of the files."""
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


def answer(handler, status, body, headers=()):
    handler.send_response(status)
    for name, value in ({"Content-Length": len(body)} | dict(headers)).items():
        handler.send_header(name, str(value))
    handler.end_headers()
    handler.wfile.write(body)


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
def said(afm):
    """Run a command in this process and return its output."""

    def run(*words, status=0):
        done = afm(*words, status=status)
        assert TOKEN not in done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture
def hub_here(hub, monkeypatch):
    """This process downloads from ``hub``. The Hub's package reads its address when it is imported."""
    constants, endpoint = pytest.importorskip("huggingface_hub.constants"), f"http://127.0.0.1:{hub.port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    addresses = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", addresses)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")


@pytest.fixture
def hub_environment(hub, tmp_path):
    """An environment that uses ``hub``."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return environment | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.port}",
        "GITHUB_RAW_ENDPOINT": f"http://127.0.0.1:{hub.port}",
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(tmp_path / "home"),
        "NO_PROXY": "127.0.0.1,localhost",
    }
