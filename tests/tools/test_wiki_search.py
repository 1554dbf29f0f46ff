import asyncio
import json
from contextlib import suppress
from pathlib import Path

import pytest
from site_server import Site
from tool_server import ToolServer, build_index, running

from afm.datasets.encyclopaedia import Encyclopaedia, write_corpus
from afm.tools.search import NO_PASSAGE, WikiSearchSettings, WikiSearchTool

ROOT = Path(__file__).parents[2]
WORLD = Encyclopaedia(300, seed=2)
TOKEN = "a-long-random-token"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wiki")
    write_corpus(WORLD, folder / "corpus.jsonl")
    assert build_index(folder / "corpus.jsonl", folder / "index").returncode == 0
    with running(ToolServer, folder) as start:
        yield start("wiki_search", "--index", folder / "index", WIKI_SERVER_TOKEN=TOKEN).url


@pytest.fixture
def answering():
    """Starts a server that gives these answers, one after the other; the last one again and again."""
    site = Site()

    def of(*answers):
        script = list(answers)

        def answer(handler):
            status, body, headers = script.pop(0) if len(script) > 1 else script[0]
            handler.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                handler.send_header(name, value)
            handler.end_headers()
            with suppress(ConnectionError):  # clients of these tests leave early
                handler.wfile.write(body)
            handler.close_connection = True

        site.pages["/retrieve"] = answer
        return site.url

    yield of
    site.close()


def tool(*urls, token=TOKEN, **settings):
    return WikiSearchTool(urls, settings=WikiSearchSettings(**settings), token=token)


async def call(searcher, argument):
    try:
        return await searcher.call(argument)
    finally:
        await searcher.close()


def good(*contents):
    found = [{"document": {"id": "1", "contents": text}, "score": 1.0} for text in contents]
    return 200, json.dumps({"result": [found]}).encode(), {}


@pytest.mark.parametrize("path", ["", "/retrieve", "/"])
async def test_passages_are_numbered_with_title_and_text(server, path):
    page = WORLD.page(200)
    result = await call(tool(server + path, topk=2), f"  {page.title}\n")
    assert (result.ok, result.meta["hits"]) == (True, 2)
    assert result.text.startswith(f"[1] {page.title}\n{page.text}\n\n[2] ")


async def test_nothing_found_and_empty_queries_are_told(server):
    assert (await call(tool(server), "xyzzy")).text == NO_PASSAGE
    empty = await call(tool(server), " \n ")
    assert empty.ok
    assert empty.meta["reason"] == "bad_argument"
    assert (await call(tool(server), "\ud800 mayor")).ok
    assert "has 2001 characters" in (await call(tool(server), "x" * 2001)).text


async def test_long_passages_are_cut_at_the_end(server):
    result = await call(tool(server, topk=1, max_passage_chars=100), WORLD.page(200).title)
    assert len(result.text) <= 100
    assert result.text.endswith(" ...")


async def test_a_wrong_token_fails_at_once_and_is_not_told(server):
    result = await call(tool(server, token="not-the-token"), "mayor")
    assert not result.ok
    assert "set WIKI_SERVER_TOKEN" in result.text
    assert "not-the-token" not in result.text


@pytest.mark.parametrize(
    "odd", [(), (200, b"no json", {}), (401, b"{}", {}), (404, b"no", {}), (500, b"{}", {})]
)
async def test_a_server_that_is_down_or_set_up_wrongly_is_passed_over(server, answering, odd):
    searcher = tool(answering(odd) if odd else "http://127.0.0.1:9", server)
    assert all([(await searcher.call("mayor")).ok for _ in range(2)])
    await searcher.close()


async def test_no_server_at_all_is_an_infrastructure_failure():
    result = await call(tool("http://127.0.0.1:9", tries=2), "mayor")
    assert (result.ok, result.meta["reason"]) == (False, "server")
    assert "ConnectError" in result.text


async def test_servers_are_asked_in_turn():
    sites = [Site(), Site()]
    for site in sites:
        site.pages["/retrieve"] = (200, "application/json", good("x")[1])
    searcher = tool(*(site.url for site in sites))
    assert all([(await searcher.call("x")).ok for _ in range(4)])
    await searcher.close()
    assert [len(site.asked) for site in sites] == [2, 2]
    for site in sites:
        site.close()


@pytest.mark.slow
async def test_failures_and_busy_servers_are_asked_again(answering):
    busy = [(429, b"{}", {"Retry-After": "0"}), (429, b"{}", {"Retry-After": "soon"})]
    url = answering((503, b"{}", {}), *busy, good('"Ada"\nA person.'))
    assert (await call(tool(url, tries=2), "Ada")).text == "[1] Ada\nA person."


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, b"<html>", {}), "its answer is not"),
        ((200, b'{"result": [[{"id": "1"}]]}', {}), "its answer is not"),
        ((200, b'{"result"', {"Content-Length": "100"}), "RemoteProtocolError"),
        ((200, b"this is no gzip data", {"Content-Encoding": "gzip"}), "DecodingError"),
        ((200, b"x" * (9 << 20), {}), "longer than 8 MiB"),
        ((404, b"nothing here", {}), "status 404: nothing here"),
        ((500, b"\xff", {}), "status 500"),
    ],
)
async def test_broken_answers_are_typed_failures(answering, answer, message):
    result = await call(tool(answering(answer), tries=2), "Ada")
    assert not result.ok
    assert message in result.text


async def test_a_server_that_hangs_costs_bounded_time():
    async def silent(reader, writer):
        await reader.read(10_000)
        await asyncio.sleep(30)

    hanging = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{hanging.sockets[0].getsockname()[1]}"
    async with asyncio.timeout(20):
        result = await call(tool(url, timeout_s=0.3, tries=2), "Ada")
    assert "no answer within 0.3 s" in result.text
    hanging.close()


async def test_passages_of_other_layouts_are_shown(answering):
    url = answering(good("no title", '"Only a title"', ""))
    assert (await call(tool(url), "x")).text == "[1] no title\n\n[2] Only a title\n\n[3]"
