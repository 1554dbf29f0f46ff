import asyncio
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from afm.datasets.encyclopaedia import Encyclopaedia, write_corpus
from afm.errors import ConfigError
from afm.tools import load_tools
from afm.tools.wiki_search import NOTHING_FOUND, WikiSearchSettings, WikiSearchTool

ROOT = Path(__file__).parents[2]
WORLD = Encyclopaedia(300, seed=2)
TOKEN = "a-long-random-token"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wiki")
    write_corpus(WORLD, folder / "corpus.jsonl")
    module = [sys.executable, "-m", "tool_servers", "wiki_search"]
    build = [sys.executable, "-m", "tool_servers.wiki_search.build", str(folder / "corpus.jsonl"), "--out"]
    subprocess.run([*build, str(folder / "index")], cwd=ROOT, check=True, capture_output=True)
    environment = os.environ | {"WIKI_SERVER_TOKEN": TOKEN, "SERVER_HOST": "127.0.0.1"}
    command = [*module, "--index", str(folder / "index"), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield process.stdout.readline().split()[-1]
        process.terminate()


@pytest.fixture
def odd_server():
    """A server that gives the answers it is told to, one after the other; the last one again and again."""
    script = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body, headers = script.pop(0) if len(script) > 1 else script[0]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_):
            """Clients of these tests leave early."""

    with Server(("127.0.0.1", 0), Handler) as odd:
        threading.Thread(target=odd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{odd.server_port}", script
        odd.shutdown()


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
    assert result.ok
    first, second = result.text.split("\n\n")
    assert first == f"[1] {page.title}\n{page.text}"
    assert second.startswith("[2] ")
    assert result.meta["hits"] == 2


async def test_nothing_found_and_empty_queries_are_told(server):
    assert (await call(tool(server), "xyzzy")).text == NOTHING_FOUND
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


async def test_a_server_that_is_down_is_passed_over(server, unused_tcp_port):
    searcher = tool(f"http://127.0.0.1:{unused_tcp_port}", server)
    results = [await searcher.call("mayor") for _ in range(2)]
    await searcher.close()
    assert all(result.ok for result in results)


async def test_no_server_at_all_is_an_infrastructure_failure(unused_tcp_port):
    result = await call(tool(f"http://127.0.0.1:{unused_tcp_port}", tries=2), "mayor")
    assert not result.ok
    assert result.meta["reason"] == "server"
    assert "ConnectError" in result.text


async def test_failures_and_busy_servers_are_asked_again(odd_server):
    url, script = odd_server
    script += [(503, b"{}", {}), (429, b"{}", {"Retry-After": "0"}), (429, b"{}", {"Retry-After": "soon"})]
    script += [good('"Ada"\nA person.')]
    assert (await call(tool(url, tries=2), "Ada")).text == "[1] Ada\nA person."


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((200, b"<html>", {}), "its answer is not"),
        ((200, b'{"result": []}', {}), "its answer is not"),
        ((200, b'{"result": [[{"id": "1"}]]}', {}), "its answer is not"),
        ((200, b'{"result"', {"Content-Length": "100"}), "RemoteProtocolError"),
        ((200, b"this is no gzip data", {"Content-Encoding": "gzip"}), "DecodingError"),
        ((200, b"x" * (9 << 20), {}), "longer than 8 MiB"),
        ((404, b"nothing here", {}), "status 404: nothing here"),
        ((500, b"\xff", {}), "status 500"),
    ],
)
async def test_broken_answers_are_typed_failures(odd_server, answer, told):
    url, script = odd_server
    script.append(answer)
    result = await call(tool(url, tries=2), "Ada")
    assert not result.ok
    assert told in result.text


async def test_a_server_that_hangs_costs_bounded_time():
    async def silent(reader, writer):
        await reader.read(10_000)
        await asyncio.sleep(30)

    hanging = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{hanging.sockets[0].getsockname()[1]}"
    async with asyncio.timeout(5):
        result = await call(tool(url, timeout_s=0.3, tries=2), "Ada")
    assert "no answer within 0.3 s" in result.text
    hanging.close()


async def test_passages_of_other_layouts_are_shown(odd_server):
    url, script = odd_server
    script.append(good("no title", '"Only a title"', ""))
    assert (await call(tool(url), "x")).text == "[1] no title\n\n[2] Only a title\n\n[3]"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("ftp://x", "expected an address"),
        ("localhost", "expected an address"),
        ("http://u:p@x", "put the token into"),
    ],
)
def test_wrong_addresses_are_refused(url, told):
    with pytest.raises(ConfigError, match=told):
        tool(url)


@pytest.mark.parametrize("path", ["tools/wiki_rag.yaml", "tiny/tools/wiki_rag.yaml"])
def test_the_shipped_files_make_the_tool(path):
    assert isinstance(load_tools(ROOT / "configs" / path)["wiki_search"], WikiSearchTool)
