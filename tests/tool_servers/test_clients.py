"""The client examples of the documentation, unchanged except for the ports of running servers."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from extras import needs
from tool_server import ToolServer, running

needs("requests")

ROOT = Path(__file__).parents[2]
EXAMPLES = re.findall(r"```python\n(.*?)\n```", (ROOT / "docs/tools.md").read_text(), re.DOTALL)
WEB_DOC, WIKI_DOC = ((ROOT / f"docs/{name}.md").read_text() for name in ("web", "wiki"))
TOKEN = "a-long-random-token"


def example(mark):
    [found] = [text for text in EXAMPLES if mark in text]
    assert len([line for line in found.splitlines() if line.strip()]) <= 11
    return found


def run(program, places, folder, **variables):
    for before, after in places.items():
        assert before in program
        program = program.replace(before, after)
    environment = os.environ | {"NO_PROXY": "127.0.0.1"} | variables
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def server(tmp_path):
    """Start servers; return their addresses."""
    with running(ToolServer, tmp_path) as start:
        yield lambda name, *words, **options: start(name, *words, **options).url


@pytest.fixture
def model(site):
    """A model endpoint that looks at pictures, calls an offered tool, and repeats the result of the tool."""
    from PIL import Image

    def reply(handler):
        request = json.loads(handler.body)
        content = request["messages"][-1]["content"]
        if "tools" in request:
            name = request["tools"][0]["function"]["name"]
            function = {"name": name, "arguments": json.dumps({"queries": [content]})}
            message = {"tool_calls": [{"id": "1", "type": "function", "function": function}]}
        elif isinstance(content, list):
            data = content[1]["image_url"]["url"].partition("base64,")[2]
            with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
                message = {"content": f"{picture.getpixel((0, 0))}"}
        else:
            message = {"content": f"The tool said: {content}"}
        message = {"role": "assistant", "content": None} | message
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return 200, "application/json", json.dumps(answer).encode()

    site.pages["/v1/chat/completions"] = reply
    return site.url


@pytest.mark.slow
def test_requests_searches_the_wiki_that_the_docs_make(server, tmp_path):
    """The first two blocks of docs/wiki.md, unchanged except for the port."""
    commands, program = re.findall(r"```(?:bash|python)\n(.*?)\n```", WIKI_DOC, re.DOTALL)[:2]
    lines = [shlex.split(line, comments=True) for line in commands.splitlines()]
    world, build, serve = filter(None, lines)
    for words in (world, build):
        command = [sys.executable, "-m", "afm.cli.main", *words[1:]]
        subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    assert serve == ["afm", "serve", "wiki", "--index", "index"]
    url = server("wiki_search", "--index", tmp_path / "index", WIKI_SERVER_TOKEN="")
    assert len(program.splitlines()) <= 11
    printed = run(program, {"http://127.0.0.1:8000": url}, tmp_path)
    asked = re.search(r'"queries": \["capital of (.*?)"\]', program)[1]
    first = printed.partition("\n")[0]
    assert re.fullmatch(rf'[0-9.]+ "{asked}"', first), printed
    assert "capital" in printed


def test_requests_alone_can_use_both_servers_of_the_web(server, site, tmp_path):
    [program] = re.findall(r"```python\n(.*?)```", WEB_DOC, re.DOTALL)
    assert len(program.strip().splitlines()) <= 11
    site.pages["/anduin"] = (200, "text/html", b"<p>The Anduin is 1388 miles long.</p>")
    store = tmp_path / "pages.jsonl"
    store.write_text(json.dumps({"url": f"{site.url}/anduin", "title": "Anduin", "text": "A river."}))
    usual = {"WEB_SERVER_TOKEN": TOKEN, "WEB_CACHE": tmp_path / "cache.sqlite"}
    places = {"http://127.0.0.1:9001": server("web_search", WEB_PAGE_STORE=store, **usual)}
    settings = {"trusted": [site.host], "workers": 1}
    places["http://127.0.0.1:9000"] = server("crawl_page", settings=settings, **usual)
    printed = run(program, places, tmp_path, WEB_SERVER_TOKEN=TOKEN)
    assert printed == f"{site.url}/anduin The Anduin is 1388 miles long.\n"


@pytest.mark.sandbox
def test_requests_runs_a_program(server, tmp_path):
    url = server("code", CODE_SERVER_TOKEN=TOKEN)
    printed = run(example("9002"), {"http://127.0.0.1:9002": url}, tmp_path, CODE_SERVER_TOKEN=TOKEN)
    assert printed == "42\n ok\n"


def test_requests_shows_a_picture(server, model, tmp_path):
    from PIL import Image

    Image.new("RGB", (20, 20), (0, 128, 0)).save(tmp_path / "picture.png")
    url = server(
        "visual_inspector",
        VISION_OPENAI_API_BASE_URL=f"{model}/v1",
        VISION_MODEL="m",
        WEB_SERVER_TOKEN=TOKEN,
        WEB_CACHE=str(tmp_path / "cache.sqlite"),
    )
    printed = run(example("9003"), {"http://127.0.0.1:9003": url}, tmp_path, WEB_SERVER_TOKEN=TOKEN)
    assert printed == "(0, 128, 0)\n"


@pytest.mark.slow
@pytest.mark.sandbox
def test_an_mcp_client_lists_and_calls_tools(server, tmp_path):
    pytest.importorskip("mcp")
    url = server("mcp", "--http", "--tools", ROOT / "configs/tools/code_executor.yaml", MCP_SERVER_TOKEN="")
    assert run(example("from mcp"), {"http://127.0.0.1:9004": url}, tmp_path) == "['code']\n42\n"


@pytest.mark.slow
def test_the_stock_openai_client_searches_through_a_model(server, model, mill_index, tmp_path):
    pytest.importorskip("openai")
    url = server("wiki_search", "--index", mill_index, WIKI_SERVER_TOKEN="")
    places = {"http://127.0.0.1:8000": url, "http://127.0.0.1:8001": model}
    printed = run(example("from openai"), places, tmp_path)
    assert printed.startswith("The tool said: ")
    assert "built in 1702" in printed
