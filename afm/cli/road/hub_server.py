"""A Hub on this machine: folders as repositories, in the protocol that ``afm data download`` speaks, and GitHub's raw files."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/datasets/([^/]+/[^/]+)(?:/revision/[^/]+)?")
_RESOLVED = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/[^/]+/(.+)")
_RANGE = re.compile(r"bytes=(\d+)-")


@contextmanager
def hub_server(folder: Path) -> Iterator[str]:
    """Serve ``folder/OWNER/NAME`` while the block runs: as data sets of the Hub, and below ``/OWNER/NAME/COMMIT/`` as GitHub does.

    Yields:
        The address, for ``HF_ENDPOINT`` and ``GITHUB_RAW_ENDPOINT``.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if found := _API.fullmatch(path):
                return self._describe(folder / found[1])
            resolved = _RESOLVED.fullmatch(path)
            file = folder / (f"{resolved[1]}/{resolved[2]}" if resolved else path.lstrip("/"))
            if not file.resolve().is_relative_to(folder.resolve()) or not file.is_file():
                return self._send(404, b"Entry not found", {"X-Error-Code": "EntryNotFound"})
            content = file.read_bytes()
            begin = _RANGE.fullmatch(self.headers.get("Range", ""))
            start = int(begin[1]) if begin else 0
            headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
            if resolved:
                headers["X-Repo-Commit"] = _commit(folder / resolved[1])
            if begin:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            return self._send(206 if begin else 200, content[start:], headers)

        def _describe(self, repository: Path) -> None:
            if not repository.is_dir():
                return self._send(404, b"Repository not found", {"X-Error-Code": "RepoNotFound"})
            files = [_described(path, repository) for path in _files(repository)]
            name = repository.relative_to(folder).as_posix()
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

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
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
