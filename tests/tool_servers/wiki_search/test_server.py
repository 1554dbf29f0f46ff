import asyncio
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import httpx
import pytest
import requests

from tool_servers.wiki_search.bm25 import Bm25


def raw(server, content):
    """Post a raw body."""
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{server.url}/retrieve", content=content, headers=headers, timeout=60, trust_env=False)


def test_a_client_written_for_search_r1_gets_what_it_expects(server, world):
    page = world.page(1500)
    answer = server.post(queries=[page.title, "mayor"], topk=2, return_scores=True)
    (first, second), mayors = answer.json()["result"]
    assert len(mayors) == 2
    # As Search-R1's own client parses it.
    title, *text = first["document"]["contents"].split("\n")
    assert (title.strip('"'), "\n".join(text)) == (page.title, page.text)
    assert first["document"]["id"] == "1500"
    assert first["score"] > second["score"] > 0


@pytest.mark.parametrize("more", [{}, {"topk": None}, {"other": 1}])
def test_without_scores_the_passages_stand_alone_and_topk_has_a_default(server, more):
    [found] = server.post(queries=["mayor"], **more).json()["result"]
    assert [set(passage) for passage in found] == [{"id", "contents"}] * 3


def test_results_are_those_of_the_engine_and_nothing_found_is_an_empty_list(server, index):
    answer = server.post(queries=["friend of the mayor", "xyzzy", ""], topk=5, return_scores=True)
    result = answer.json()["result"]
    [expected] = Bm25(index).search(["friend of the mayor"], 5)
    assert [(int(hit["document"]["id"]), hit["score"]) for hit in result[0]] == expected
    assert result[1:] == [[], []]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "body: Invalid JSON"),
        (b'{"queries": "one"}', "queries: got 'one' (text), expected a list"),
        (b'{"queries": ["x"], "topk": 101}', "topk: got 101, expected 1 to 100"),
        (b'{"queries": ["x"], "topk": -1}', "topk: got -1"),
        (b'{"queries": ["x"], "topk": true}', "topk: got True (boolean), expected a whole number"),
        (b'{"queries": ["x", null]}', "queries.1: got None (null), expected text"),
        (b"[" * 100_000, "body: Invalid JSON"),
        (b"9" * 5_000, "body: Invalid JSON"),
        (json.dumps({"queries": ["x"] * 4097}).encode(), "queries: got 4097, expected at most 4096"),
    ],
)
def test_wrong_requests_get_a_structured_error(server, body, message):
    response = raw(server, body)
    assert response.status_code == 400
    assert response.json()["error"].startswith(message)


def test_search_r1s_own_batch_is_answered_in_one_request(server, world):
    """512 questions with five samples each. A model wrote the queries, so some of them are odd."""
    titles = [world.page(number % 512).title for number in range(512 * 5)]
    titles[7] = f"{titles[7]} " + "x" * 30_000
    titles[8] = f"{titles[8]} \ud800"
    payload = {"queries": titles, "topk": 3, "return_scores": True}
    answer = requests.post(f"{server.url}/retrieve", json=payload).json()
    firsts = [hits[0]["document"]["id"] for hits in answer["result"]]
    assert firsts == [str(number % 512) for number in range(512 * 5)]
    length = len(titles[7])
    note = f"the query has {length} characters; only the first 8192 were used"
    assert answer["notes"] == [{"query": 7, "note": note}]


@pytest.mark.slow
def test_a_batch_of_the_most_and_longest_queries_fits_into_one_request(server):
    queries = [f"{number} " + "\u00e9" * 8_000 for number in range(4_096)]
    response = raw(server, json.dumps({"queries": queries}, ensure_ascii=False).encode())
    assert response.status_code == 200
    assert len(response.json()["result"]) == 4_096


@pytest.mark.parametrize("odd", [b"\\ud800", b"\xed\xa0\x80", b"\xff", b"\\u0000"])
def test_what_no_text_can_hold_is_replaced_in_its_query_alone(server, world, odd):
    title = world.page(1500).title.encode()
    answer = raw(server, b'{"queries": ["%b %b", "%b"], "topk": 1}' % (odd, title, title))
    assert answer.json() == {"result": [[{"id": "1500", "contents": ANY}]] * 2}


@pytest.mark.slow
async def test_many_clients_at_once_get_their_own_answers(start, world, index):
    server, engine = start(), Bm25(index)
    async with httpx.AsyncClient(
        trust_env=False, timeout=120, limits=httpx.Limits(max_connections=64)
    ) as client:

        async def ask(number):
            body = {"queries": [f"{world.page(number).title} {number}"], "topk": 1 + number % 3}
            response = await client.post(f"{server.url}/retrieve", json=body)
            return [passage["id"] for passage in response.json()["result"][0]]

        numbers = range(0, 2_000, 10)
        answers = await asyncio.gather(*(ask(number) for number in numbers))
        text = (await client.get(f"{server.url}/metrics")).text
    for number, ids in zip(numbers, answers, strict=True):
        [expected] = engine.search([f"{world.page(number).title} {number}"], 1 + number % 3)
        assert ids == [str(passage) for passage, _ in expected]
    assert 'afm_wiki_requests_total{outcome="ok"} 200' in text


@pytest.mark.slow
def test_the_afm_command_serves(index):
    command = [Path(sys.executable).with_name("afm"), "serve", "wiki", "--index", index, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split()[-1]
        answer = httpx.post(f"{url}/retrieve", json={"queries": ["mayor"]}, timeout=60, trust_env=False)
        assert len(answer.json()["result"][0]) == 3
        process.terminate()
