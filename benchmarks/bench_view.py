"""Measure the viewer with a million episodes: first paint and filters in Chromium, and the cost of the index.

    .venv/bin/python benchmarks/bench_view.py --episodes 1000000 --out view.json

``afm view`` indexes a file of generated episodes (four benchmarks, four tools, one call each). Headless Chromium (Debian's,
driven by Playwright) then opens it. First paint is the time until the list has rows, with a finished index. For each filter,
search and order, it is the time from the choice to the new count or first row on the page. The rival in the same run reads
the file once with ``json`` to count the matches of a filter.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from timing import environment, report

SOURCES = ("nq", "musique", "hotpotqa", "gaia")
TOOLS = ("wiki_search", "web_search", "crawl_page", "code")
TARGETS = {"first_paint_s": 2.0, "filter_s": 0.5}


def episode(number: int, draw: random.Random) -> str:
    """Generate a line of about a kilobyte."""
    score, tool = float(draw.random() < 0.5), draw.choice(TOOLS)
    words = " ".join(draw.choice(("river", "ruler", "city", "long", "old", "deep")) for _ in range(60))
    agent = f"<think>{words}</think><plan>Search.</plan><think>Now.</think><wiki_search>river {number}</wiki_search>"
    seen = f"\n<observation>\n{words}\n</observation>\n"
    call = {
        "role": "wiki_search",
        "tool": tool,
        "argument": "",
        "observation": "",
        "ok": True,
        "seconds": 0.1,
    }
    texts = ((agent, "agent"), (seen, "environment"), (f"<answer>{number}</answer>", "agent"))
    row = {
        "id": f"e{number}",
        "agent": "mhqa",
        "agent_digest": "",
        "question": f"How long is river {number}?",
        "segments": [{"author": author, "text": text} for text, author in texts],
        "data_source": draw.choice(SOURCES),
        "verdict": {"score": score},
        "cost": {"agent_tokens": draw.randrange(20, 4000), "wall_seconds": draw.random() * 60},
        "calls": [call],
    }
    return json.dumps(row)


def make(file: Path, episodes: int) -> None:
    """Write the file of episodes."""
    draw = random.Random(0)
    with file.open("w", encoding="utf-8") as out:
        for number in range(episodes):
            out.write(episode(number, draw) + "\n")


def indexed(file: Path, place: Path) -> dict[str, Any]:
    """Build the index; return seconds and size."""
    from afm.evaluation.viewer import EpisodeIndex

    begun = time.perf_counter()
    *_, last = EpisodeIndex(file, place).refresh()
    seconds = time.perf_counter() - begun
    size = sum(path.stat().st_size for path in place.parent.glob(f"{place.name}*"))
    return {
        "seconds": round(seconds, 1),
        "episodes_per_s": round(last.episodes / seconds),
        "megabytes": round(size / 1e6),
        "of_file_megabytes": round(file.stat().st_size / 1e6),
    }


@contextmanager
def serving(file: Path, place: Path) -> Iterator[str]:
    """Run ``afm view`` as a process; yield its address."""
    command = [sys.executable, "-m", "afm.cli.main", "view", str(file), "--index", str(place)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        if found is None:
            raise SystemExit("`afm view` did not start")
        yield found[0]
    finally:
        process.terminate()
        process.wait()


def in_browser(address: str, runs: int) -> dict[str, Any]:
    """Return the median times in the browser."""
    from playwright.sync_api import expect, sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        count = page.locator("#count")

        def opened() -> None:
            page.goto("about:blank")
            page.goto(f"{address}#view=episodes")
            page.wait_for_selector("#list a")

        def chosen(name: str, value: str) -> Callable[[], None]:
            def choose() -> None:
                opened()
                before = count.inner_text()
                begun = time.perf_counter()
                page.select_option(f"select[name={name}]", value)
                expect(count).not_to_have_text(before)
                seconds.append(time.perf_counter() - begun)

            return choose

        def searched(text: str) -> Callable[[], None]:
            def search() -> None:
                opened()
                before = count.inner_text()
                begun = time.perf_counter()
                page.fill("#text", text)
                expect(count).not_to_have_text(before)
                seconds.append(time.perf_counter() - begun)

            return search

        found: dict[str, Any] = {}
        paints = [_timed(opened) for _ in range(runs)]
        found["first_paint_s"] = round(statistics.median(paints), 3)
        ways = {
            "verdict": chosen("verdict", "failed"),
            "benchmark": chosen("source", "gaia"),
            "tool": chosen("tool", "code"),
            "search of a rare word": searched("river 4711"),
            "search of a word in every episode": searched("river"),
        }
        for name, way in ways.items():
            seconds: list[float] = []
            for _ in range(runs):
                way()
            found[name] = round(statistics.median(seconds), 3)
        browser.close()
    return found


def _timed(way: Callable[[], None]) -> float:
    begun = time.perf_counter()
    way()
    return time.perf_counter() - begun


def by_json(file: Path) -> float:
    """Return the seconds of a plain script that counts failed episodes."""
    begun = time.perf_counter()
    with file.open("rb") as lines:
        failed = sum(json.loads(line)["verdict"]["score"] == 0 for line in lines)
    if not failed:
        raise SystemExit("no failed episode")
    return round(time.perf_counter() - begun, 2)


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        file, index = Path(place) / "episodes.jsonl", Path(place) / "index.sqlite"
        make(file, given.episodes)
        result: dict[str, Any] = {
            "benchmark": "view",
            "episodes": given.episodes,
            "index": indexed(file, index),
        }
        with serving(file, index) as address:
            result["browser"] = in_browser(address, given.runs)
        result["plain_json_count_s"] = by_json(file)
    result |= {"targets": TARGETS, "environment": environment(["afm", "fastapi", "playwright"])}
    report(result, given.out)


if __name__ == "__main__":
    main()
