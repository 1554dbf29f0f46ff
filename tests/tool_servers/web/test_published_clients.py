"""Clients written for AFM's search and page servers, with our servers: their message formats, and the clients themselves."""

from __future__ import annotations

import json
import os

import pytest
from published_repository import lay_out, needs_repository, run

HOST = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}.7"
"""A loopback address only for this process, because AFM's tools always use the ports 9000 and 9001."""
TOOLS = "verl/verl/tools"
FILES = [
    f"{TOOLS}/{name}.py" for name in ("__init__", "base_tool", "schemas", "web_search_v2", "crawl_page_v2")
]
PAGE = b"<html><head><title>Rivers</title></head><body><article><p>The Anduin is 1388 miles long.</p></article></body></html>"
STORED = {"url": "http://a.example.org/anduin", "title": "Anduin", "text": "The Anduin is a river."}


@pytest.fixture
def crawl(start, site):
    site.pages["/rivers"] = (200, "text/html", PAGE)
    return start("crawl_page", {"trusted": [site.host], "workers": 1})


def afm_request(*urls, **further):
    """Return a request with the fields that AFM's tool sends, with an invented key."""
    return {
        "urls": list(urls),
        "task": "How long is the river?",
        "web_search_query": "length of the Anduin",
        "think_content": "the page should say",
        "summary_type": "page",
        "chunk_size": 8192,
        "do_last_summary": False,
        "api_url": "http://127.0.0.1:1/v1",
        "api_key": "key-in-a-body",
        "model": "m",
    } | further


@pytest.mark.slow
def test_a_page_request_in_afms_form_is_answered_in_afms_form(crawl, site):
    answer = crawl.post("/crawl_page", **afm_request(f"{site.url}/rivers")).json()
    assert answer["success"] is True
    assert answer["error_message"] is None
    assert "1388 miles" in answer["obs"]
    assert f"{site.url}/rivers" in answer["obs"]
    assert isinstance(answer["processing_time"], float)
    assert answer["pages"][0]["title"] == "Rivers"
    assert "key-in-a-body" not in crawl.log.read_text()


@pytest.mark.slow
def test_pages_that_cannot_be_read_are_a_failure_with_a_reason(crawl, site):
    answer = crawl.post("/crawl_page", **afm_request(f"{site.url}/gone")).json()
    assert answer["success"] is False
    assert "404" in answer["error_message"]
    both = crawl.post("/crawl_page", **afm_request(f"{site.url}/gone", f"{site.url}/rivers")).json()
    assert both["success"] is True
    nothing = crawl.post("/crawl_page", **afm_request()).json()
    assert (nothing["success"], nothing["error_message"]) == (False, "the request holds no address")


def test_our_own_requests_are_answered_without_afms_fields(crawl, site):
    answer = crawl.post("/crawl_page", urls=f"{site.url}/rivers", goal="length").json()
    assert answer.keys() == {"pages", "left_out"}


def test_a_page_is_summed_up_toward_the_question_the_search_and_the_thought(start, site):
    long = PAGE.replace(b"<article>", b"<article>" + b"<p>Hills.</p>" * 300)
    site.pages["/long"] = (200, "text/html", long)
    asked = []

    def reply(handler):
        asked.append(json.loads(handler.body))
        choices = [{"message": {"content": "summed up"}, "finish_reason": "stop"}]
        return (200, "application/json", json.dumps({"choices": choices}).encode())

    site.pages["/v1/chat/completions"] = reply
    server = start(
        "crawl_page",
        {"trusted": [site.host], "workers": 1},
        SUMMARY_OPENAI_API_BASE_URL=f"{site.url}/v1",
        SUMMARY_MODEL="ours",
    )
    answer = server.post("/crawl_page", **afm_request(f"{site.url}/long")).json()
    assert "summed up" in answer["obs"]
    messages = json.dumps(asked[0]["messages"])
    assert all(
        text in messages for text in ("How long is the river?", "length of the Anduin", "the page should say")
    )
    assert asked[0]["model"] == "ours"


RUN_TOOLS = """
import asyncio, json, sys, types
root, address = sys.argv[1:]
package = types.ModuleType("verl")
package.__path__ = [f"{root}/verl/verl"]
sys.modules["verl"] = package
from verl.tools.crawl_page_v2 import CrawlPageV2Tool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.tools.web_search_v2 import SerperCacheAPITool

async def call(kind, query):
    parameters = {"type": "object", "properties": {}, "required": []}
    function = {"name": "tool", "description": "a tool", "parameters": parameters}
    tool = kind({}, OpenAIFunctionToolSchema(type="function", function=function))
    await tool.create("one")
    return await tool.execute("one", {"query": query})

async def main():
    found = [await call(SerperCacheAPITool, "Anduin"), await call(CrawlPageV2Tool, f"{address}/rivers | [gone]({address}/gone)")]
    print("FOUND", json.dumps(found))

asyncio.run(main())
"""


@pytest.fixture
def servers(start_process, site, tmp_path):
    """Start our servers at the ports that AFM's tools use."""
    site.pages["/rivers"] = (200, "text/html", PAGE)
    store = tmp_path / "pages.jsonl"
    store.write_text(json.dumps(STORED))
    local = {"SERVER_HOST": HOST, "WEB_SERVER_TOKEN": ""}
    start_process("crawl_page", {"trusted": [site.host], "workers": 1}, "--port", "9000", **local)
    start_process("web_search", None, "--port", "9001", WEB_PAGE_STORE=store, **local)
    return {
        "SERVER_HOST": HOST,
        "WEB_SEARCH_SERPER_API_KEY": "api key",
        "SUMMARY_OPENAI_API_BASE_URL": "api url",
        "SUMMARY_OPENAI_API_KEY": "api key",
        "SUMMARY_MODEL": "qwen2.5-72b-instruct",
    }


@needs_repository
def test_afms_unmodified_tools_search_and_read_with_our_servers(servers, site, tmp_path):
    printed = run(RUN_TOOLS, lay_out(tmp_path, *FILES), site.url, **servers)
    search, crawled = json.loads(printed.partition("FOUND ")[2])
    assert "[Anduin](http://a.example.org/anduin)" in search[0]
    assert "error" not in search[2]
    assert "1388 miles" in crawled[0]
    assert crawled[2]["urls_count"] == 2
    assert crawled[2]["processing_time"] > 0


@needs_repository
def test_afms_unmodified_evaluation_searches_and_reads_with_our_servers(servers, site, tmp_path):
    code = f"""
import sys
sys.path.insert(0, sys.argv[1])
import web_tools
print(web_tools.WebSearchTool("http://{HOST}:9001/search", "", "", "", "", "Anduin", "<think>x</think>"))
print(web_tools.CrawlPageTool("http://{HOST}:9000/crawl_page", "", "", "", "", sys.argv[2], "<think>x</think>"))
"""
    folder = lay_out(tmp_path, "AFM/evaluation/web_agent/web_tools.py") / "AFM/evaluation/web_agent"
    printed = run(
        code, folder, f"{site.url}/rivers", UNI_API_URLS="http://127.0.0.1:1/v1", UNI_API_KEY="k", **servers
    )
    assert "[Anduin](http://a.example.org/anduin)" in printed
    assert "The Anduin is 1388 miles long." in printed


@needs_repository
def test_afms_unmodified_test_of_the_page_server_passes(servers, site, tmp_path):
    """It requests Wikipedia pages, which cannot be reached here, so it reports failures in its own form."""
    name = "AFM/tool_servers/web_server/server_tests/test_crawl_page_simple_v2.py"
    script = lay_out(tmp_path, name) / name
    printed = run(
        f"import runpy, sys; sys.argv = ['x', 'http://{HOST}:9000/crawl_page']; runpy.run_path({str(script)!r})",
        **servers,
    )
    assert printed.count("Testing Summary Type") == 2
    assert "Unknown Error" not in printed
    assert printed.count("Success!") + printed.count("Fail: ") == 2
