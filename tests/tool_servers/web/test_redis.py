"""Servers whose cache is a real Redis that is killed under load and comes back: they go on, and cache again."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter

import pytest

CLIENTS = 24
SLOWEST_S = 15.0
"""A cache that is away costs two seconds now and then; the rest is the load of this machine."""
LEAST = 30
"""Answers in each phase that did not come from the cache."""


class Search:
    """Asks a search server; the provider answers a query with a page of that name."""

    def __init__(self, start, site, cache):
        def results(handler):
            query = json.loads(handler.body)["q"]
            hit = {"title": query, "link": f"https://example.org/{query}", "snippet": "text"}
            return (200, "application/json", json.dumps({"organic": [hit]}).encode())

        site.pages["/search"] = results
        self._server = start(
            "web_search",
            {"serper_url": site.url},
            WEB_CACHE=cache,
            WEB_SEARCH_METHOD_TYPE="serper",
            WEB_SEARCH_SERPER_API_KEY="key",
        )

    async def ask(self, client, name):
        """The name that was answered, and whether it came from the cache."""
        answer = (await self._server.apost(client, "/search", q=name)).json()
        return [hit["title"] for hit in answer["organic"]], answer["cached"]


@pytest.mark.slow
async def test_redis_killed_and_started_again_under_a_servers_load(start, site, client, redis_server):
    asked = Search(start, site, redis_server.url)
    assert await asked.ask(client, "before") == (["before"], False)
    assert await asked.ask(client, "before") == (["before"], True)
    numbers, over = itertools.count(), asyncio.Event()
    seconds, answers, phase = [], Counter(), "up"

    async def one_client():
        while not over.is_set():
            number = next(numbers)
            name = f"n{number // 2}"  # every other request could come from the cache
            began = time.monotonic()
            found, cached = await asked.ask(client, name)
            seconds.append(time.monotonic() - began)
            assert found == [name]
            answers[phase, cached] += 1

    async def enough():
        for _ in range(600):
            if answers[phase, False] >= LEAST:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"hardly any answers while Redis was {phase}: {answers}")

    clients = [asyncio.create_task(one_client()) for _ in range(CLIENTS)]
    await enough()
    await asyncio.to_thread(redis_server.kill)
    phase = "away"
    await enough()
    await asyncio.to_thread(redis_server.start)
    phase = "back"
    await enough()
    over.set()
    await asyncio.gather(*clients)
    assert max(seconds) < SLOWEST_S
    for _ in range(100):  # a Redis that failed is left alone for a second
        if await asked.ask(client, "after") == (["after"], True):
            break
        await asyncio.sleep(0.2)
    else:
        raise AssertionError("a Redis that is back is not used again")
    assert await asked.ask(client, "before") == (["before"], True)
