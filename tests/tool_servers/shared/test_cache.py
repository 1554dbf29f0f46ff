from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import time

import pytest
from pydantic import TypeAdapter

from afm.errors import ConfigError
from tool_servers.shared.cache import open_cache


@pytest.fixture(params=["sqlite", "redis"])
def where(request, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tool_servers.shared.cache._TIMEOUT_S", 30.0
    )  # Redis answers; a busy machine delays it
    if request.param == "sqlite":
        return tmp_path / "a folder" / "cache.sqlite"
    return request.getfixturevalue("redis_server").url


class Caches:
    """Opens caches, and closes them at the end."""

    def __init__(self):
        self._open = []

    def __call__(self, where, kind="page", max_entries=10_000, ttl_s=600):
        self._open.append(open_cache(str(where), kind, max_entries=max_entries, ttl_s=ttl_s))
        return self._open[-1]

    async def close(self):
        while self._open:
            await self._open.pop().close()


@pytest.fixture
async def opened():
    caches = Caches()
    yield caches
    await caches.close()


async def test_texts_come_back_until_they_are_too_old(where, opened):
    cache, brief = opened(where), opened(where, "brief", ttl_s=0.1)
    assert await cache.get("a") is None
    for each in (cache, brief):
        await each.put("a", "naïve \x00 \ud800")
    for _ in range(3000):
        if await brief.get("a") is None:
            break
        await asyncio.sleep(0.02)
    assert await brief.get("a") is None
    assert await cache.get("a") == "naïve \x00 ?"
    assert cache.errors == brief.errors == 0


async def test_texts_survive_the_process_and_caches_do_not_mix(where, opened):
    first = opened(where)
    await first.put("a", "1")
    assert await first.add("run", 2) == 2
    await opened.close()
    second, other = opened(where), opened(where, "search")
    assert (await second.get("a"), await other.get("a")) == ("1", None)
    assert (await second.add("run", 1), await other.add("run", 1)) == (3, 1)


async def test_the_oldest_are_dropped(where, opened):
    cache = opened(where, max_entries=100)
    for number in range(300):
        await cache.put(f"{number:03}", "x")
    kept = [number for number in range(300) if await cache.get(f"{number:03}") is not None]
    assert 100 <= len(kept) <= 164
    assert kept[-100:] == list(range(200, 300))


async def test_a_damaged_file_is_set_aside(path, opened):
    path.write_bytes(b"this is no database, " * 1000)
    cache = opened(path)
    await cache.put("a", "1")
    assert await cache.get("a") == "1"
    assert path.with_name("cache.sqlite.damaged").read_bytes().startswith(b"this is no database")


async def test_a_text_that_cannot_be_read_is_a_counted_miss(path, opened):
    cache = opened(path)
    for value in (b"\x00\x11", None, "text", 7):
        await cache.put("a", "1")
        with sqlite3.connect(path) as other:
            other.execute("UPDATE texts SET value = ?", (value,))
        assert await cache.get("a") is None
    assert cache.errors == 4
    await cache.put("a", "2")
    assert await cache.get("a") == "2"


@pytest.mark.parametrize("kept", ['{"an older": "page"}', "no JSON", "[]"])
async def test_what_another_version_of_a_server_kept_is_made_anew(path, opened, kept):
    cache, kind = opened(path), TypeAdapter(dict[str, int])

    async def work():
        return {"a": 1}

    await cache.put("k", kept)
    assert [await cache.cached("k", kind, work) for _ in range(2)] == [({"a": 1}, False), ({"a": 1}, True)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.sqlite"


async def filled(cache, count):
    """Fill the cache with texts and a budget counter of 5."""
    for number in range(count):
        await cache.put(str(number), os.urandom(400).hex())
    assert await cache.add("run", 5) == 5
    return cache


async def test_damage_found_in_use_is_set_aside_once_and_the_budget_goes_on(path, opened, monkeypatch):
    monkeypatch.setattr("tool_servers.shared.cache._RENEWAL_S", 0.0)  # allows a second renewal at once
    await filled(opened(path), 200)
    await opened.close()
    cache, neighbour = opened(path), opened(path)
    assert await cache.add("run", 1) == 6
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(os.urandom(whole - 8192))
    for number in range(200):
        await cache.get(str(number))
        await neighbour.get(str(number))
    assert 0 < cache.errors < 200
    for one in (cache, neighbour):
        await one.put("new", "1")
    errors = cache.errors + neighbour.errors
    assert (await cache.get("new"), await neighbour.get("new")) == ("1", "1")
    assert (await cache.add("run", 1), await neighbour.add("run", 1)) == (7, 8)
    assert cache.errors + neighbour.errors == errors
    assert path.with_name("cache.sqlite.damaged").stat().st_size == whole
    await opened.close()
    with sqlite3.connect(path) as other:
        assert other.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.slow
async def test_a_locked_file_costs_a_second_once_and_can_be_read_meanwhile(path, opened):
    cache = await filled(opened(path), 1)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    began = time.monotonic()  # one second per put would take 50 s
    await asyncio.gather(*(cache.put(f"new {number}", "x") for number in range(50)))
    assert await cache.get("0") is not None
    assert await cache.get("1") is None
    assert time.monotonic() - began < 25
    assert cache.errors == 50
    assert [await cache.add("run", 1) for _ in range(3)] == [6, 7, 8]
    other.execute("ROLLBACK")
    await asyncio.sleep(1.1)
    assert await cache.add("run", 1) == 9
    await opened.close()
    assert other.execute("SELECT value FROM counters").fetchone() == (9,)
    other.close()


async def test_a_budget_goes_on_when_its_counter_is_gone(path, opened):
    cache = await filled(opened(path), 1)
    with sqlite3.connect(path) as other:
        other.execute("DROP TABLE counters")
    assert [await cache.add("run", 1) for _ in range(3)] == [6, 7, 8]
    assert await cache.get("0") is not None


def test_a_file_of_another_program_is_left_alone(path, opened):
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE texts (a)")
    with pytest.raises(ConfigError, match="cannot be opened"):
        opened(path)
    assert not path.with_name("cache.sqlite.damaged").exists()


NO_ADDRESS = "no valid Redis address"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("redis://localhost:x/0", NO_ADDRESS),
        ("redis://localhost/0?socket_timeout=abc", NO_ADDRESS),
        ("redis://localhost/0?bogus=1", NO_ADDRESS),
        (f"{__file__}/cache.sqlite", "cannot be opened"),
    ],
)
def test_a_wrong_address_and_a_file_that_cannot_be_made_are_refused_at_opening(opened, where, message):
    with pytest.raises(ConfigError, match=message):
        opened(where)


@pytest.mark.slow
async def test_what_redis_missed_is_added_when_it_is_back(redis_server, opened):
    cache = opened(redis_server.url)
    assert await cache.add("run", 5) == 5
    redis_server.kill()
    assert [await cache.add("run", 1) for _ in range(3)] == [6, 7, 8]
    redis_server.start()
    await asyncio.sleep(1.1)
    assert await cache.add("run", 1) == 9
    assert await opened(redis_server.url).add("run", 1) == 10


WRITER = """
import asyncio, sys
from tool_servers.shared.cache import open_cache

async def main():
    cache = open_cache(sys.argv[1], "page", max_entries=100_000, ttl_s=600)
    for number in range(100_000):
        await cache.put(str(number), "x" * 2000)
        print(number, flush=True)

asyncio.run(main())
"""


def killed_while_writing(path):
    """Return the number of the last text that was certainly stored."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True)
    for line in writer.stdout:
        if int(line) >= 200:
            break
    writer.kill()
    last = int((line + writer.stdout.read()).split("\n")[-2])
    writer.wait(60)
    return last


async def test_what_was_put_is_there_after_kill_9(path, opened):
    last = await asyncio.to_thread(killed_while_writing, path)
    cache = opened(path, max_entries=100_000)
    assert [number for number in range(last) if await cache.get(str(number)) != "x" * 2000] == []
    assert cache.errors == 0


@pytest.mark.slow
async def test_redis_killed_and_started_again_under_load(redis_server, opened):
    cache = opened(redis_server.url)
    done, over = 0, asyncio.Event()

    async def client(number):
        nonlocal done
        while not over.is_set():
            await cache.put(f"{number}", "x" * 1000)
            assert await cache.get(f"{number}") in (None, "x" * 1000)
            await cache.add("run", 1)
            done += 1
            await asyncio.sleep(0.001)

    clients = [asyncio.create_task(client(number)) for number in range(32)]

    async def done_reaches(number):
        for _ in range(3000):
            if done >= number:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{done} of {number} turns")

    async with asyncio.timeout(120):
        await done_reaches(64)
        await asyncio.to_thread(redis_server.kill)
        await done_reaches(done + 64)  # no client waits for the dead store
        assert cache.errors > 0
        await asyncio.to_thread(redis_server.start)
        while await cache.get("back") is None:
            await cache.put("back", "1")
            await asyncio.sleep(0.1)
        over.set()
        await asyncio.gather(*clients)
    errors = cache.errors
    await cache.put("after", "1")
    assert (await cache.get("after"), cache.errors) == ("1", errors)


@pytest.mark.slow
async def test_a_redis_that_hangs_costs_a_second_once(opened):
    async def silent(reader, writer):
        await asyncio.sleep(300)

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    cache = opened(f"redis://:secret@127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
    began = time.monotonic()  # one second per get would take 100 s
    assert [await cache.get(str(number)) for number in range(100)] == [None] * 100
    assert time.monotonic() - began < 50
    assert [await cache.add("run", 1) for _ in range(3)] == [1, 2, 3]
    assert cache.errors == 103
    server.close()
