"""Test the web servers under load and faults: many clients, and an upstream that hangs, breaks, floods and lies.

    .venv/bin/python benchmarks/load_web.py --clients 500 --seconds 60 --out web_load.json

Half of the requests are searches (a fifth of them repeated), half are pages. One page in eight hangs, answers 500, ends
early, floods, drips, is not HTML, redirects into a private network, or is a gzip bomb. Every answer must be 200 or a counted
429, and a bad page must be reported as bad within the time of the request. With ``--floods 8``, 8 further clients only read
endless pages, in chunks of one byte or interim answers. They are not timed.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from timing import environment, report

ROOT = Path(__file__).parents[1]
FAULTS = ("hang", "500", "half", "flood", "drip", "binary", "private", "bomb")
KINDS = {"hang": "timeout", "500": "status", "half": "broken", "flood": "too_large", "drip": "timeout"}
KINDS |= {"binary": "type", "private": "blocked", "bomb": "too_large"}
FLOODS = {"crumbs": b"1\r\nx\r\n" * 10_000, "interim": b"HTTP/1.1 100 Continue\r\n\r\n" * 2_000}
FETCH_S, REQUEST_S = 3.0, 20.0
PARAGRAPH = (
    "<p>The river number {n} of page {name} is {n} miles long, says the survey of hills and clouds.</p>"
)


class Upstream:
    """Search provider and web site in one, in a separate process."""

    def __init__(self) -> None:
        self._bomb = gzip.compress(bytes(64 << 20))

    async def serve(self, place: Any) -> None:
        """Listen, send the port through ``place``, and never return."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=2048)
        place.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                if not await self._answered(head.split(b" ")[1].decode(), body, writer):
                    break
                await writer.drain()
        except (OSError, EOFError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answered(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        if path == "/search":
            query = json.loads(body)["q"]
            hits = [
                {"title": f"{query} {n}", "link": f"https://e.org/{n}", "snippet": "s"} for n in range(10)
            ]
            writer.write(_http(json.dumps({"organic": hits}).encode(), "application/json"))
            return True
        fault, _, name = path.strip("/").partition("-")
        match fault:
            case "hang":
                await asyncio.sleep(60)
            case "500":
                writer.write(_http(b"oops", status="500 Oops"))
                return True
            case "half":
                writer.write(_http(b"x" * 9000)[:4000])
            case "flood":
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                for _ in range(1024):
                    writer.write(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
                    await writer.drain()
            case "drip":
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 1000\r\n\r\n")
                for _ in range(600):
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.1)
            case "crumbs" | "interim":
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" * (fault == "crumbs"))
                while True:
                    writer.write(FLOODS[fault])
                    await writer.drain()
            case "binary":
                writer.write(_http(b"\0" * 99, "application/octet-stream"))
                return True
            case "private":
                writer.write(_http(b"", status="302 Found", more="Location: http://169.254.169.254/\r\n"))
                return True
            case "bomb":
                writer.write(_http(self._bomb, more="Content-Encoding: gzip\r\n"))
                return True
            case _:
                text = "".join(PARAGRAPH.format(n=n, name=name) for n in range(60))
                writer.write(_http(f"<title>{name}</title>{text}".encode()))
                return True
        await writer.drain()
        return False


def _http(body: bytes, media_type: str = "text/html", *, status: str = "200 OK", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {media_type}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def upstream(place: Any) -> None:
    """Run the upstream."""
    asyncio.run(Upstream().serve(place))


def started(name: str, settings: dict[str, Any], folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Start one of our servers; return its process and address."""
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(settings))
    variables = {
        "WEB_CACHE": str(folder / f"{name}.sqlite"),
        "WEB_SEARCH_METHOD_TYPE": "serper",
        "WEB_SEARCH_SERPER_API_KEY": "none",
        "NO_PROXY": "127.0.0.1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tool_servers", name, "--config", str(config), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | variables,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


class Connection:
    """A persistent HTTP/1.1 connection with little overhead in the client."""

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Post a request; return the status and JSON of the answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        content = json.dumps(body).encode()
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n".encode()
            + content
        )
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: (\d+)", head)
            answer = await reader.readexactly(int(length[1]) if length else 0)
        except (OSError, EOFError):
            self.close()
            raise
        return int(head.split(b" ")[1]), json.loads(answer)

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
        self._streams = None


class Clients:
    """Sends requests and judges the answers."""

    def __init__(self, search_url: str, crawl_url: str, site: str) -> None:
        self._search_url, self._crawl_url, self._site = search_url, crawl_url, site
        self.outcomes: Counter[str] = Counter()
        self.pages: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {"search": [], "crawl": []}

    async def run(self, clients: int, seconds: float, floods: int) -> None:
        """Run clients for a number of seconds."""
        until = time.monotonic() + seconds
        await asyncio.gather(
            *(self._client(number, until) for number in range(clients)),
            *(self._flooded(number, until) for number in range(floods)),
        )

    async def _flooded(self, number: int, until: float) -> None:
        fault, connection, asked = list(FLOODS)[number % len(FLOODS)], Connection(self._crawl_url), 0
        while time.monotonic() < until:
            asked += 1
            body = {"urls": f"{self._site}/{fault}-{number}-{asked}", "goal": "", "seconds": REQUEST_S}
            _, answer = await connection.post("/crawl_page", body)
            self.pages[f"{fault}: {answer['pages'][0]['kind']}"] += 1
        connection.close()

    async def _client(self, number: int, until: float) -> None:
        draw = random.Random(number)
        connections = {url: Connection(url) for url in (self._search_url, self._crawl_url)}
        await asyncio.sleep(draw.random())
        while time.monotonic() < until:
            search = draw.random() < 0.5
            connection = connections[self._search_url if search else self._crawl_url]
            try:
                status = await (self._search if search else self._crawl)(connection, draw)
            except (OSError, EOFError) as error:
                status = f"{'search' if search else 'crawl'}: {type(error).__name__}"
            self.outcomes[status] += 1
            await asyncio.sleep(0.2 if status == "429" else 0.02)
        for connection in connections.values():
            connection.close()

    async def _search(self, connection: Connection, draw: random.Random) -> str:
        query = f"query {draw.randrange(100) if draw.random() < 0.2 else draw.random()}"
        began = time.monotonic()
        status, answer = await connection.post("/search", {"q": query})
        if status == 200:
            self.seconds["search"].append(time.monotonic() - began)
            if answer["organic"][0]["title"] != f"{query} 0":
                return "wrong result"
        return str(status)

    async def _crawl(self, connection: Connection, draw: random.Random) -> str:
        kind = draw.choice(FAULTS) if draw.random() < 1 / 8 else "page"
        name = f"{kind}-{draw.randrange(2000)}"
        body = {"urls": f"{self._site}/{name}", "goal": "which river is 17 miles long?", "seconds": REQUEST_S}
        began = time.monotonic()
        status, answer = await connection.post("/crawl_page", body)
        if status != 200:
            return str(status)
        self.seconds["crawl"].append(time.monotonic() - began)
        [page] = answer["pages"]
        self.pages[f"{kind}: {page['kind'] or 'read'}"] += 1
        if time.monotonic() - began > REQUEST_S + 2:
            return "late"
        if kind == "page" and page["kind"] is None and "17 miles long" not in page["text"]:
            return "wrong page"
        if page["kind"] not in (KINDS.get(kind), "timeout"):
            return "wrong kind"
        return "200"


def spread(values: list[float]) -> dict[str, float]:
    """Return percentiles in milliseconds."""
    ordered = sorted(values) or [0.0]
    return {
        f"p{p}": round(1000 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 1) for p in (50, 99)
    }


def resident_mib(process: subprocess.Popen[str]) -> float:
    """Return the peak memory of the process itself, in MiB."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+)", text)
    return round(int(match[1]) / 1024, 1) if match else 0.0


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--floods", type=int, default=0, help="clients that read endless pages")
    parser.add_argument("--smoke", action="store_true", help="few clients, a few seconds")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    clients, seconds = (20, 4.0) if given.smoke else (given.clients, given.seconds)
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.Process(target=upstream, args=(theirs,), daemon=True)
    other.start()
    site = f"127.0.0.1:{ours.recv()}"
    with tempfile.TemporaryDirectory() as folder:
        crawl_settings = {"trusted": [site], "fetch_s": FETCH_S, "max_bytes": 4 << 20}
        search, search_url = started("web_search", {"serper_url": f"http://{site}"}, Path(folder))
        crawl, crawl_url = started("crawl_page", crawl_settings, Path(folder))
        asked = Clients(search_url, crawl_url, f"http://{site}")
        asyncio.run(asked.run(clients, seconds, given.floods))
        memory = {"web_search": resident_mib(search), "crawl_page": resident_mib(crawl)}
        for process in (search, crawl):
            process.send_signal(signal.SIGTERM)
        ended = [process.wait(30) for process in (search, crawl)]
    other.terminate()
    result = {
        "clients": clients,
        "seconds": seconds,
        "floods": given.floods,
        "answers": dict(asked.outcomes),
        "errors": sum(count for status, count in asked.outcomes.items() if status not in ("200", "429")),
        "pages": dict(sorted(asked.pages.items())),
        "milliseconds": {name: spread(values) for name, values in asked.seconds.items()},
        "peak_memory_mib": memory,
        "exit_statuses": ended,
        "environment": environment(["fastapi", "httpcore", "httpx", "trafilatura", "uvicorn"]),
    }
    report(result, given.out)


if __name__ == "__main__":
    main()
