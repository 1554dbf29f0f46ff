from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import time

import pytest

from afm.errors import ConfigError
from tool_servers.shared.cache import open_cache


@pytest.fixture(params=["sqlite", "redis"])
def where(request, tmp_path):
    return (
        str(tmp_path / "a folder" / "cache.sqlite")
        if request.param == "sqlite"
        else request.getfixturevalue("redis_server").url
    )


async def test_texts_come_back_until_they_are_too_old(where):
    cache = open_cache(where, "page", max_entries=10, ttl_s=0.3)
    assert await cache.get("a") is None
    await cache.put("a", "naïve \x00 \ud800")
    assert await cache.get("a") == "naïve \x00 ?"
    await asyncio.sleep(0.35)
    assert await cache.get("a") is None
    assert cache.errors == 0
    await cache.close()


async def test_texts_survive_the_process_and_caches_do_not_mix(where):
    first = open_cache(where, "page", max_entries=10, ttl_s=60)
    await first.put("a", "1")
    assert await first.add("run", 2) == 2
    await first.close()
    second = open_cache(where, "page", max_entries=10, ttl_s=60)
    other = open_cache(where, "search", max_entries=10, ttl_s=60)
    assert (await second.get("a"), await other.get("a")) == ("1", None)
    assert (await second.add("run", 1), await other.add("run", 1)) == (3, 1)
    await second.close()
    await other.close()


async def test_the_oldest_are_dropped(where):
    cache = open_cache(where, "page", max_entries=100, ttl_s=60)
    for number in range(300):
        await cache.put(f"{number:03}", "x")
    kept = [number for number in range(300) if await cache.get(f"{number:03}") is not None]
    assert 100 <= len(kept) <= 164
    assert kept[-100:] == list(range(200, 300))
    await cache.close()


async def test_a_damaged_file_is_set_aside(tmp_path):
    path = tmp_path / "cache.sqlite"
    path.write_bytes(b"this is no database, " * 1000)
    cache = open_cache(str(path), "page", max_entries=10, ttl_s=60)
    await cache.put("a", "1")
    assert await cache.get("a") == "1"
    await cache.close()
    assert path.with_name("cache.sqlite.damaged").read_bytes().startswith(b"this is no database")


async def test_a_text_that_cannot_be_read_is_a_counted_miss(tmp_path):
    path = str(tmp_path / "cache.sqlite")
    cache = open_cache(path, "page", max_entries=10, ttl_s=60)
    for value in (b"\x00\x11", None, "text", 7):
        await cache.put("a", "1")
        with sqlite3.connect(path) as other:
            other.execute("UPDATE texts SET value = ?", (value,))
        assert await cache.get("a") is None
    assert cache.errors == 4
    await cache.put("a", "2")
    assert await cache.get("a") == "2"
    await cache.close()


async def filled(path, count):
    """A cache whose budget counter stands at 5."""
    cache = open_cache(str(path), "page", max_entries=10_000, ttl_s=600)
    for number in range(count):
        await cache.put(str(number), os.urandom(400).hex())
    assert await cache.add("run", 5) == 5
    return cache


async def test_damage_found_in_use_is_set_aside_once_and_the_budget_goes_on(tmp_path):
    path = tmp_path / "cache.sqlite"
    await (await filled(path, 200)).close()
    cache = open_cache(str(path), "page", max_entries=10_000, ttl_s=600)
    neighbour = open_cache(str(path), "page", max_entries=10_000, ttl_s=600)
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
    await cache.close()
    await neighbour.close()
    with sqlite3.connect(path) as other:
        assert other.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_a_locked_file_costs_a_second_once_and_can_be_read_meanwhile(tmp_path):
    path = tmp_path / "cache.sqlite"
    cache = await filled(path, 1)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    await asyncio.gather(*(cache.put(f"new {number}", "x") for number in range(50)))
    assert await cache.get("0") is not None
    assert await cache.get("1") is None
    assert time.monotonic() - began < 3
    assert cache.errors == 50
    assert [await cache.add("run", 1) for _ in range(3)] == [6, 7, 8]
    other.execute("ROLLBACK")
    await asyncio.sleep(1.1)
    assert await cache.add("run", 1) == 9
    await cache.close()
    assert other.execute("SELECT value FROM counters").fetchone() == (9,)
    other.close()


async def test_a_budget_goes_on_when_its_counter_is_gone(tmp_path):
    path = tmp_path / "cache.sqlite"
    cache = await filled(path, 1)
    with sqlite3.connect(path) as other:
        other.execute("DROP TABLE counters")
    assert [await cache.add("run", 1) for _ in range(3)] == [6, 7, 8]
    assert await cache.get("0") is not None
    await cache.close()


def test_a_file_of_another_program_is_left_alone(tmp_path):
    path = tmp_path / "cache.sqlite"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE texts (a)")
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_cache(str(path), "page", max_entries=10, ttl_s=60)
    assert not path.with_name("cache.sqlite.damaged").exists()


@pytest.mark.parametrize(
    "url", ["redis://localhost:x/0", "redis://localhost/0?socket_timeout=abc", "redis://localhost/0?bogus=1"]
)
def test_a_wrong_redis_address_is_refused_at_opening(url):
    with pytest.raises(ConfigError, match="no valid Redis address"):
        open_cache(url, "page", max_entries=10, ttl_s=60)


async def test_what_redis_missed_is_added_when_it_is_back(redis_server):
    cache = open_cache(redis_server.url, "page", max_entries=10, ttl_s=60)
    assert await cache.add("run", 5) == 5
    redis_server.kill()
    assert [await cache.add("run", 1) for _ in range(3)] == [6, 7, 8]
    redis_server.start()
    await asyncio.sleep(1.1)
    assert await cache.add("run", 1) == 9
    other = open_cache(redis_server.url, "page", max_entries=10, ttl_s=60)
    assert await other.add("run", 1) == 10
    await cache.close()
    await other.close()


def test_a_file_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_cache(str(tmp_path / "file" / "cache.sqlite"), "page", max_entries=10, ttl_s=60)


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
    """Number of the last text that was surely put."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True)
    for line in writer.stdout:
        if int(line) >= 200:
            break
    writer.kill()
    last = int((line + writer.stdout.read()).split("\n")[-2])
    writer.wait(10)
    return last


async def test_what_was_put_is_there_after_kill_9(tmp_path):
    path = str(tmp_path / "cache.sqlite")
    last = await asyncio.to_thread(killed_while_writing, path)
    cache = open_cache(path, "page", max_entries=100_000, ttl_s=600)
    assert [number for number in range(last) if await cache.get(str(number)) != "x" * 2000] == []
    assert cache.errors == 0
    await cache.close()


async def test_redis_killed_and_started_again_under_load(redis_server):
    cache = open_cache(redis_server.url, "page", max_entries=10_000, ttl_s=600)
    slowest, done, over = 0.0, 0, asyncio.Event()

    async def client(number):
        nonlocal slowest, done
        while not over.is_set():
            began = time.monotonic()
            await cache.put(f"{number}", "x" * 1000)
            assert await cache.get(f"{number}") in (None, "x" * 1000)
            await cache.add("run", 1)
            slowest = max(slowest, time.monotonic() - began)
            done += 1
            await asyncio.sleep(0.001)

    clients = [asyncio.create_task(client(number)) for number in range(32)]
    await asyncio.sleep(0.5)
    before = done
    await asyncio.to_thread(redis_server.kill)
    await asyncio.sleep(0.5)
    assert cache.errors > 0
    during = done
    assert during > before
    await asyncio.to_thread(redis_server.start)
    async with asyncio.timeout(10):
        while await cache.get("back") is None:
            await cache.put("back", "1")
            await asyncio.sleep(0.1)
    over.set()
    await asyncio.gather(*clients)
    assert slowest < 5
    errors = cache.errors
    await cache.put("after", "1")
    assert (await cache.get("after"), cache.errors) == ("1", errors)
    await cache.close()


async def test_a_redis_that_hangs_costs_a_second_once():
    async def silent(reader, writer):
        await asyncio.sleep(30)

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"redis://:secret@127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    cache = open_cache(url, "page", max_entries=10, ttl_s=60)
    began = time.monotonic()
    assert [await cache.get(str(number)) for number in range(100)] == [None] * 100
    assert time.monotonic() - began < 3
    assert [await cache.add("run", 1) for _ in range(3)] == [1, 2, 3]
    assert cache.errors == 103
    await cache.close()
    server.close()
