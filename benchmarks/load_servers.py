"""Test all tool servers under load from many clients, and then kill and restart each during requests.

    .venv/bin/python benchmarks/load_servers.py --clients 500 --seconds 60 --out servers_load.json

Load: each client asks the code, wiki, search and page servers in random order. Every answer is checked. Only right answers
and status 429, which is counted, are allowed. Kill: while 64 clients keep asking, one server after another gets SIGKILL and
restarts on its port. Only the requests of that moment may break. Answers cached before must come from the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from load_web import ROOT, Connection, resident_mib, spread, upstream
from timing import environment, report

from afm.datasets.encyclopaedia import Encyclopaedia, write_corpus

PATHS = {"code": "/run", "wiki_search": "/retrieve", "web_search": "/search", "crawl_page": "/crawl_page"}
WEIGHTS = {"code": 1, "wiki_search": 4, "web_search": 4, "crawl_page": 2}
TIMEOUT_S = 90.0
KILL_CLIENTS = 64
KNOWN = 100
"""Number of requests that are cached before a kill and repeated after it."""


class Servers:
    """The servers, each on a fixed port."""

    def __init__(self, folder: Path, site: str, pages: int) -> None:
        world = Encyclopaedia(pages, seed=1)
        self.titles = [world.page(number).title for number in range(pages)]
        self.site = f"http://{site}"
        self._folder = folder
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.ports = {name: _free_port() for name in PATHS}
        self._settings = {
            "code": {"sandbox": {"backend": "auto"}},
            "wiki_search": {"index": str(folder / "index")},
            "web_search": {"serper_url": self.site},
            "crawl_page": {"trusted": [site]},
        }
        corpus = folder / "corpus.jsonl"
        write_corpus(world, corpus)
        build = ["-m", "tool_servers.wiki_search.build", str(corpus), "--output-dir", str(folder / "index")]
        subprocess.run([sys.executable, *build], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)

    def start(self, name: str) -> float:
        """Start a server; return the seconds until it listens."""
        began = time.monotonic()
        config = self._folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump(self._settings[name]))
        own = {key: value for key, value in os.environ.items() if not key.endswith("_TOKEN")}
        own |= {
            "WEB_CACHE": str(self._folder / "cache.sqlite"),
            "WEB_SEARCH_METHOD_TYPE": "serper",
            "WEB_SEARCH_SERPER_API_KEY": "none",
            "NO_PROXY": "127.0.0.1",
        }
        command = [sys.executable, "-m", "tool_servers", name, "--config", str(config)]
        process = subprocess.Popen(
            [*command, "--port", str(self.ports[name])], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=own
        )
        assert process.stdout is not None
        if not process.stdout.readline().startswith("listening on "):
            raise SystemExit(f"error: {name} did not start")
        self.processes[name] = process
        return time.monotonic() - began

    def kill(self, name: str) -> None:
        """Send SIGKILL to a server."""
        self.processes[name].kill()
        self.processes[name].wait()

    def stop(self) -> dict[str, int]:
        """Send SIGTERM to all servers; return their exit statuses."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        return {name: process.wait(60) for name, process in self.processes.items()}


class Clients:
    """Sends requests and judges the answers."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self.outcomes: dict[str, Counter[str]] = {name: Counter() for name in PATHS}
        self.seconds: dict[str, list[float]] = {name: [] for name in PATHS}
        self.killed_at = dict.fromkeys(PATHS, float("-inf"))
        self.down: str | None = None

    async def run(self, clients: int, until: float) -> None:
        """Run clients until a time on the monotonic clock."""
        await asyncio.gather(*(self._client(number, until) for number in range(clients)))

    async def ask(
        self, name: str, connection: Connection, body: dict[str, Any], wanted: Any
    ) -> tuple[str, Any]:
        """Send one request; return ``right``, ``429`` or what was wrong, and the answer."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, answer = await connection.post(PATHS[name], body)
        except TimeoutError:
            connection.close()
            return "no answer in time", None
        if status != 200:
            return str(status), answer
        self.seconds[name].append(time.monotonic() - began)
        return ("right" if wanted(answer) else "wrong answer"), answer

    def question(self, name: str, draw: random.Random) -> tuple[dict[str, Any], Any]:
        """Return a request, and a check of its answer."""
        number = draw.randrange(1_000_000)
        match name:
            case "code":
                return {"code": f"print({number} * 7)"}, lambda a: a["stdout"] == f"{number * 7}\n"
            case "wiki_search":
                title = self._servers.titles[number % len(self._servers.titles)]
                return {"queries": [title], "topk": 3}, lambda a: any(
                    title in hit["contents"] for hit in a["result"][0]
                )
            case "web_search":
                return {"q": f"query {number}"}, lambda a: a["organic"][0]["title"] == f"query {number} 0"
            case _:
                url = f"{self._servers.site}/page-{number % 5000}"
                body = {"urls": url, "goal": "which river is 17 miles long?", "seconds": 60}
                return body, lambda a: "17 miles long" in a["pages"][0]["text"]

    def connection(self, name: str) -> Connection:
        """Open a connection."""
        return Connection(f"http://127.0.0.1:{self._servers.ports[name]}")

    async def _client(self, number: int, until: float) -> None:
        draw = random.Random(number)
        connections = {name: self.connection(name) for name in PATHS}
        opened: dict[str, float] = {}
        await asyncio.sleep(draw.random())
        while time.monotonic() < until:
            [name] = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
            opened.setdefault(name, time.monotonic())
            try:
                outcome, _ = await self.ask(name, connections[name], *self.question(name, draw))
            except (OSError, EOFError) as error:
                connections[name].close()
                by_kill = self.down == name or opened.pop(name) <= self.killed_at[name]
                outcome = "broken by the kill" if by_kill else type(error).__name__
                opened.pop(name, None)
            self.outcomes[name][outcome] += 1
            await asyncio.sleep(0.02 if outcome == "right" else 0.5)
        for connection in connections.values():
            connection.close()


async def killed(servers: Servers, clients: Clients) -> dict[str, Any]:
    """Kill and restart one server after another under load."""
    questions = {name: _known(clients, name) for name in PATHS}
    before = {name: await _asked(clients, name, questions[name]) for name in PATHS}
    load = asyncio.create_task(clients.run(KILL_CLIENTS, time.monotonic() + 1e6))
    found: dict[str, Any] = {}
    for name in PATHS:
        await asyncio.sleep(1.5)
        clients.down = name
        servers.kill(name)
        clients.killed_at[name] = time.monotonic()
        restart_s = await asyncio.to_thread(servers.start, name)
        clients.down = None
        after = await _asked(clients, name, questions[name])
        found[name] = {"restart_s": round(restart_s, 2), "same_answers": after[0] == before[name][0]}
        if name in ("web_search", "crawl_page"):
            found[name] |= {"asked_again": KNOWN, "from_cache": after[1]}
    load.cancel()
    await asyncio.gather(load, return_exceptions=True)
    return found


def _known(clients: Clients, name: str) -> list[tuple[dict[str, Any], Any]]:
    draw = random.Random(-1)
    return [clients.question(name, draw) for _ in range(KNOWN)]


async def _asked(
    clients: Clients, name: str, questions: list[tuple[dict[str, Any], Any]]
) -> tuple[list[str], int]:
    """Return the outcomes in order, and the number of answers from the cache."""
    connection = clients.connection(name)
    outcomes, cached = [], 0
    for body, wanted in questions:
        outcome, answer = await clients.ask(name, connection, body, wanted)
        outcomes.append(outcome)
        if name == "web_search":
            cached += bool(answer.get("cached"))
        elif name == "crawl_page":
            cached += bool(answer["pages"][0]["cached"])
    connection.close()
    return outcomes, cached


def wrong(outcomes: dict[str, Counter[str]]) -> int:
    """Count answers that are neither right nor refused with 429."""
    allowed = ("right", "429", "broken by the kill")
    return sum(n for counts in outcomes.values() for outcome, n in counts.items() if outcome not in allowed)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def main() -> None:
    """Run and report; exit with 1 if an answer was wrong or a cache lost something."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--smoke", action="store_true", help="few clients, a few seconds")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    clients, seconds, pages = (20, 3.0, 500) if given.smoke else (given.clients, given.seconds, 20_000)
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.Process(target=upstream, args=(theirs,), daemon=True)
    other.start()
    with tempfile.TemporaryDirectory() as folder:
        servers = Servers(Path(folder), f"127.0.0.1:{ours.recv()}", pages)
        try:
            start_s = {name: round(servers.start(name), 2) for name in PATHS}
            load = Clients(servers)
            asyncio.run(load.run(clients, time.monotonic() + seconds))
            memory = {name: resident_mib(process) for name, process in servers.processes.items()}
            kill = Clients(servers)
            restarts = asyncio.run(killed(servers, kill))
        finally:
            ended = servers.stop()
    other.terminate()
    intact = all(
        row["same_answers"] and row.get("from_cache", 0) == row.get("asked_again", 0)
        for row in restarts.values()
    )
    result = {
        "clients": clients,
        "seconds": seconds,
        "errors": wrong(load.outcomes),
        "answers": {name: dict(counts) for name, counts in load.outcomes.items()},
        "milliseconds": {name: spread(values) for name, values in load.seconds.items()},
        "peak_memory_mib": memory,
        "start_s": start_s,
        "kill": restarts,
        "kill_errors": wrong(kill.outcomes),
        "kill_answers": {name: dict(counts) for name, counts in kill.outcomes.items()},
        "caches_intact": intact,
        "exit_statuses": ended,
        "environment": environment(["fastapi", "httpcore", "httpx", "trafilatura", "uvicorn"]),
    }
    report(json.loads(json.dumps(result)), given.out)
    if result["errors"] or result["kill_errors"] or not intact:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
