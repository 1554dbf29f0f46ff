"""The web search server over HTTP, with a provider that is a real server."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from tool_server import ToolServer

from afm.errors import ConfigError, DataError
from afm.settings import Environment
from tool_servers.web_search.providers import SearchSettings, open_local, open_provider

A = "http://a.example.org"
PAGES = [
    {"url": f"{A}/anduin", "title": "Anduin", "text": "The Anduin is a river, 1388 miles long."},
    {"url": f"{A}/bree", "title": "Bree", "text": "Bree is a village of men and hobbits."},
    {"url": f"{A}/rivers", "title": "Rivers", "text": "Long rivers: Anduin, Isen. " + "Hills. " * 200},
]
RESULTS = [
    {
        "title": f"Title {n}\u202e",
        "link": f"https://example.org/{n}",
        "snippet": f"Snippet\x00 {n}",
        "position": n,
    }
    for n in range(1, 13)
]


@pytest.fixture
def provider(site):
    site.pages["/search"] = lambda handler: reply({"organic": [*RESULTS, "junk", {"link": "javascript:x"}]})
    return site


def reply(value, status=200):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return (status, "application/json", body)


def serper(start, site, cache=None, **settings):
    settings = {"serper_url": site.url, "try_s": 60, "total_s": 120} | settings
    variables = {"WEB_SEARCH_METHOD_TYPE": "serper", "WEB_SEARCH_SERPER_API_KEY": "serper-secret"}
    return start("web_search", settings, **variables | ({"WEB_CACHE": cache} if cache else {}))


def hit(title, link, snippet):
    return {"title": title, "link": link, "snippet": snippet, "position": 1}


def test_serper_results_cached_the_key_in_the_header_only(start, provider):
    server = serper(start, provider)
    answer = server.post("/search", q="  long\n river ", num=10).json()
    assert answer["searchParameters"]["q"] == "long river"
    assert answer["organic"][0] == hit("Title 1", "https://example.org/1", "Snippet 1")
    assert [hit["position"] for hit in answer["organic"]] == list(range(1, 11))
    again = [server.post("/search", q="long river", **more).json() for more in ({}, {"num": 3})]
    assert [answer["cached"], *(each["cached"] for each in again)] == [False, True, False]
    assert [json.loads(body)["num"] for body in provider.bodies] == [10, 3]
    assert json.loads(provider.bodies[0])["q"] == "long river"
    assert provider.headers[0]["X-API-KEY"] == "serper-secret"
    seen = (*provider.asked, *map(str, provider.bodies), server.log.read_text(), server.metrics())
    assert not [text for text in seen if "serper-secret" in text]


@pytest.mark.slow
def test_results_are_kept_in_redis_where_one_is_set_up_and_go_on_without_it(start, provider, redis_server):
    servers = [serper(start, provider, redis_server.url) for _ in range(2)]
    assert [server.post("/search", q="river").json()["cached"] for server in servers] == [False, True]
    redis_server.kill()
    assert servers[0].post("/search", q="river").json()["cached"] is False


def test_busy_and_failing_providers_are_asked_again(start, provider):
    turns = iter([reply(b"slow down", 429), reply(b"oops", 500), reply({"organic": RESULTS[:1]})])
    provider.pages["/search"] = lambda handler: next(turns)
    assert len(serper(start, provider).post("/search", q="x").json()["organic"]) == 1
    assert len(provider.asked) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "kind", "asked"),
    [
        (reply(b"serper-secret is no key", 403), "key", 1),
        (reply(b"serper-secret went wrong", 400), "status", 1),
        (reply(b"serper-secret oops", 500), "status", 4),
        (reply(b"serper-secret not json"), "broken", 1),
        (reply({"organic": "many"}), "broken", 1),
        (reply(b'"' + b"x" * (5 << 20) + b'"'), "too_large", 1),
    ],
    ids=["key", "bad", "500", "no JSON", "no list", "large"],
)
def test_what_a_provider_does_wrong_is_told_without_the_key(start, provider, answer, kind, asked):
    provider.pages["/search"] = answer
    server = serper(start, provider)
    response = server.post("/search", q="x")
    assert (response.status_code, response.json()["kind"]) == (502, kind)
    assert len(provider.asked) == asked
    assert "serper-secret" not in response.text + server.log.read_text()


def hang(handler):
    time.sleep(100)


def half(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"organic": [')
    handler.close_connection = True


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "kinds"), [(hang, {"timeout"}), (half, {"broken", "timeout"})])
def test_providers_that_hang_or_break_off_are_given_up_in_bounded_time(start, provider, fault, kinds):
    provider.pages["/search"] = fault
    server = serper(start, provider, try_s=0.5, total_s=1.5)
    response = server.post("/search", q="x")
    assert response.status_code == 502
    assert response.json()["kind"] in kinds


def test_a_run_has_a_budget_and_the_cache_is_free(start, provider):
    server = serper(start, provider, searches_per_run=2)
    statuses = [server.post("/search", q=query, run="r1").status_code for query in ("a", "b", "a", "c", "b")]
    assert statuses == [200, 200, 200, 402, 200]
    assert server.post("/search", q="c", run="r1").json()["kind"] == "budget"
    assert server.post("/search", q="c", run="r2").status_code == 200
    assert len(provider.asked) == 3


async def test_equal_searches_at_the_same_time_are_paid_once(start, provider, client):
    provider.pages["/search"] = lambda handler: (time.sleep(0.4), reply({"organic": RESULTS}))[1]
    server = serper(start, provider)
    answers = await asyncio.gather(*(server.apost(client, "/search", q="x") for _ in range(50)))
    assert {answer.status_code for answer in answers} == {200}
    assert len(provider.asked) == 1


def test_searxng_json(start, site):
    found = [{"title": "T", "url": "https://example.org/", "content": "C", "engine": "e"}]
    site.pages["/search"] = reply({"results": found * 20})
    server = start("web_search", WEB_SEARCH_METHOD_TYPE="searxng", SEARXNG_BASE_URL=site.url)
    results = server.post("/search", q="a & b", num=4).json()["organic"]
    assert (len(results), results[0]) == (4, hit("T", "https://example.org/", "C"))
    assert site.asked == ["/search?q=a+%26+b&format=json"]


@pytest.fixture
def page_file(tmp_path):
    path = tmp_path / "pages.jsonl"
    path.write_text("\n".join(json.dumps(page) for page in PAGES) + "\n\n")
    return path


def test_local_pages_without_key_or_network(start, page_file):
    server = start(
        "web_search", {"searches_per_run": 1}, WEB_PAGE_STORE=page_file
    )  # local searches are free and never cached
    hits = server.post("/search", q="How long is the Anduin?").json()["organic"]
    assert not server.post("/search", q="How long is the Anduin?").json()["cached"]
    assert [hit["link"] for hit in hits] == ["http://a.example.org/anduin", "http://a.example.org/rivers"]
    assert hits[0]["snippet"] == "The Anduin is a river, 1388 miles long."
    assert hits[1]["snippet"].startswith("Long rivers: Anduin, Isen.")
    assert len(hits[1]["snippet"]) <= 300
    assert server.post("/search", q="xylophone").json()["organic"] == []


def test_a_wiki_index_as_local_pages(start, mill_index):
    settings = {"page_url": "http://127.0.0.1:8008/wiki/{title}"}
    server = start("web_search", settings, WEB_PAGE_STORE=mill_index)
    [result] = server.post("/search", q="age of the mill").json()["organic"]
    assert (result["title"], result["link"]) == ("Old Mill", "http://127.0.0.1:8008/wiki/Old_Mill")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "WEB_PAGE_STORE is not set"),
        ({"WEB_PAGE_STORE": "/no/such/file"}, "no such file or folder"),
        ({"WEB_SEARCH_METHOD_TYPE": "serper"}, "WEB_SEARCH_SERPER_API_KEY is not set"),
        ({"WEB_SEARCH_METHOD_TYPE": "searxng"}, "SEARXNG_BASE_URL is not set"),
    ],
    ids=["no pages", "no file", "no key", "no address"],
)
def test_what_is_missing_is_told_before_the_start(tmp_path, variables, message):
    with pytest.raises(ConfigError, match=message):
        ToolServer("web_search", tmp_path, **variables)


def test_a_damaged_page_file_is_named_with_its_line(page_file, tmp_path):
    page_file.write_text(json.dumps(PAGES[0]) + '\n{"url": "x"}\n')
    with pytest.raises(DataError, match=f"{page_file}:2: not a page \\('title'\\)"):
        ToolServer("web_search", tmp_path, WEB_PAGE_STORE=page_file)


def test_wrong_requests_get_structured_errors(start, page_file):
    server = start("web_search", {"max_query_chars": 20}, WEB_PAGE_STORE=page_file)
    for body in ({}, {"q": ""}, {"q": "x", "num": 0}, {"q": "x" * 21}):
        response = server.post("/search", **body)
        assert (response.status_code, response.json()["kind"]) == (400, "request")


async def test_half_a_surrogate_pair_in_a_page_can_be_sent(tmp_path):
    pages = tmp_path / "pages.jsonl"
    pages.write_text('{"id": "\\ud800", "title": "River \\ud800", "text": "A long river \\udfff here."}\n')
    provider = open_local(pages, "http://127.0.0.1:8008/{title}/{id}")
    [hit] = await provider.search("river", 3)
    assert (hit.title, hit.snippet, hit.link) == (
        "River ?",
        "A long river ? here.",
        "http://127.0.0.1:8008/River_%3F/%3F",
    )


async def test_half_a_surrogate_pair_in_a_result_can_be_sent(site):
    site.pages["/search"] = reply({"organic": [{"link": "https://e.org/\ud800"}]})
    environment = Environment(web_search_method_type="serper", web_search_serper_api_key="a-key")
    provider = open_provider(SearchSettings(serper_url=site.url), environment)
    [found] = await provider.search("river", 3)
    await provider.close()
    assert found.title == found.link == "https://e.org/\ufffd"
