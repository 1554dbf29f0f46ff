"""The page server as its users meet it: a process, HTTP, a real web site."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

PATIENCE_S = 5.0
"""Of a sender: far longer than a page takes once a parser runs."""

ARTICLE = "\n".join(
    [
        "<html><head><title>Rivers &amp; seas</title><script>alert('tracking')</script></head><body><article><h1>Rivers</h1>"
    ]
    + [
        f"<p>Paragraph {n} tells of hills and clouds and of how they came to be, at some length.</p>"
        for n in range(150)
    ]
    + ["<p>The Anduin is <b>1388</b> miles long, see <a href='/more?x=1'>more</a>.</p>"]
    + [
        f"<p>Paragraph {n} tells of seas and winds and of how they came to be, at some length.</p>"
        for n in range(150)
    ]
    + ["</article></body></html>"]
).encode()


def html(body, status=200):
    return (status, "text/html; charset=utf-8", body)


@pytest.fixture
def server(start, site):
    return start(
        "crawl_page", {"trusted": [site.host], "shown_chars": 1500, "fetch_s": 2, "parse_s": 5, "workers": 1}
    )


def pages(response):
    assert response.status_code == 200, response.text
    return response.json()["pages"]


def test_a_page_is_read_toward_the_goal_and_cached(server, site):
    site.pages["/rivers"] = html(ARTICLE)
    (page,) = pages(server.post("/crawl_page", urls=f"{site.url}/rivers", goal="How long is the Anduin?"))
    assert page["title"] == "Rivers & seas"
    assert "1388" in page["text"]
    assert f"[more]({site.url}/more?x=1)" in page["text"]
    assert "alert" not in page["text"]
    assert len(page["text"]) <= 1500
    assert (page["kind"], page["by"], page["cached"]) == (None, "passages", False)
    (again,) = pages(server.post("/crawl_page", urls=f"{site.url}/rivers", goal="hills"))
    assert again["cached"]
    assert site.asked == ["/rivers"]


@pytest.mark.parametrize("text", ['{"an older": "page"}', "no JSON", "[]"])
def test_a_cached_page_of_another_version_is_read_again(server, site, spoil, text):
    site.pages["/rivers"] = html(ARTICLE)
    server.post("/crawl_page", urls=f"{site.url}/rivers")
    spoil(text)
    (page,) = pages(server.post("/crawl_page", urls=f"{site.url}/rivers"))
    assert (page["title"], page["cached"]) == ("Rivers & seas", False)


def test_several_pages_and_each_failure_in_words(server, site, tmp_path):
    site.pages["/a"] = html(b"<p>first page</p>")
    site.pages["/j"] = (200, "application/json", b'{"answer": [42]}')
    site.pages["/bad-json"] = (200, "application/json", b'{"answer": [42')
    site.pages["/t"] = (200, "text/plain", "naïve".encode("latin-1"))
    site.pages["/empty"] = html(b"<script>1</script>")
    site.pages["/500"] = html(b"oops", status=500)
    site.pages["/video"] = (200, "video/mp4", b"xxxx")
    site.pages["/moved"] = lambda handler: moved(handler, "http://169.254.169.254/latest/meta-data/")
    wanted = [
        ("/a", None, "first page"),
        ("/j", None, '{\n "answer": [\n  42\n ]\n}'),
        ("/bad-json", None, '{"answer": [42'),
        ("/t", None, "naïve"),
        ("/empty", "parse", "the page holds no readable text"),
        ("/500", "status", "the server answers with status 500"),
        ("/video", "type", "the address leads to a file of type 'video/mp4', which is not read"),
        ("/moved", "blocked", "169.254.169.254 is no public address; only public web pages are fetched"),
    ]
    urls = " | ".join(f"[{path}]({site.url}{path})" for path, _, _ in wanted)
    found = pages(server.post("/crawl_page", urls=urls))
    assert [(page["kind"], page["text"]) for page in found] == [(kind, text) for _, kind, text in wanted]


def moved(handler, location):
    handler.send_response(302)
    handler.send_header("Location", location)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def test_the_servers_own_machine_is_not_read(server, site, another_site):
    another_site.pages["/"] = html(b"secret")
    _, port = another_site.host.split(":")
    urls = [
        another_site.url,
        f"http://localhost:{port}",
        f"http://2130706433:{port}",
        server.url,
        "file:///etc/passwd",
    ]
    assert [page["kind"] for page in pages(server.post("/crawl_page", urls=urls))] == ["blocked"] * 5
    assert another_site.asked == []


@pytest.mark.slow
def test_a_pdf_and_hostile_files_in_bounded_time(server, site):
    site.pages["/good.pdf"] = (200, "application/pdf", pdf_of("The Anduin is 1388 miles long."))
    site.pages["/loop.pdf"] = (200, "application/pdf", pdf_that_never_ends())
    site.pages["/junk.pdf"] = (200, "application/pdf", b"%PDF-1.7\n" + bytes(range(256)) * 4000)
    site.pages["/deep.html"] = html(b"<div><b><i>" * 600_000)
    site.pages["/table.html"] = html(b"<table><tr><td>" * 300_000 + b"x")
    site.pages["/attributes.html"] = html(b"<a " + b"b=c " * 1_000_000 + b">x</a>")
    site.pages["/after.html"] = html(b"<p>still reading</p>")
    began = time.monotonic()
    found = {}
    for name in [
        "good.pdf",
        "loop.pdf",
        "junk.pdf",
        "deep.html",
        "table.html",
        "attributes.html",
        "after.html",
    ]:
        (found[name],) = pages(server.post("/crawl_page", urls=f"{site.url}/{name}"))
    assert time.monotonic() - began < 60
    assert "1388 miles" in found["good.pdf"]["text"]
    assert found["loop.pdf"]["kind"] == "parse"
    assert found["loop.pdf"]["text"] == "reading the page took longer than 5 s"
    assert found["junk.pdf"]["kind"] == "parse"
    assert found["after.html"]["text"] == "still reading"


def pdf_of(text):
    stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    return pdf(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
            b" /Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
            b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        ]
    )


def pdf_that_never_ends():
    """Five thousand pages with the same two megabytes of drawing each."""
    stream = b"BT /F1 12 Tf " + b"1 0 0 1 0 0 Tm () Tj " * 100_000 + b"ET"
    kids = b" ".join([b"3 0 R"] * 5000)
    return pdf(
        [
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [%s] /Count 5000 >>" % kids,
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
            b" /Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
            b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        ]
    )


def pdf(objects):
    out, places = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % place for place in places)
    out += b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)
    return bytes(out)


@pytest.mark.slow
def test_slow_pages_end_with_the_senders_patience(start, site):
    server = start("crawl_page", {"trusted": [site.host], "fetch_s": 60, "workers": 1})
    over = threading.Event()
    site.pages["/slow"] = lambda handler: (over.wait(60), None)[1]
    site.pages["/a"] = html(b"<p>first page</p>")
    pages(server.post("/crawl_page", urls=f"{site.url}/a"))
    began = time.monotonic()
    slow, fast = pages(
        server.post("/crawl_page", urls=[f"{site.url}/slow", f"{site.url}/a"], seconds=PATIENCE_S)
    )
    assert time.monotonic() - began < PATIENCE_S
    assert (slow["kind"], fast["text"]) == ("timeout", "first page")
    over.set()


def test_wrong_requests_get_structured_errors(server):
    for body in ({}, {"urls": 5}, {"urls": "x", "seconds": -1}, {"urls": "x" * 200_000}):
        assert server.post("/crawl_page", **body).status_code == 400
    assert server.post("/crawl_page", urls="").json() == {"pages": [], "left_out": 0}
    many = " | ".join(f"http://127.0.0.1/{n}" for n in range(10))
    assert server.post("/crawl_page", urls=many).json()["left_out"] == 2


async def test_equal_addresses_at_the_same_time_are_fetched_once(server, site, client):
    site.pages["/slow"] = lambda handler: (time.sleep(0.5), html(b"<p>slow page</p>"))[1]
    answers = await asyncio.gather(
        *(server.apost(client, "/crawl_page", urls=f"{site.url}/slow") for _ in range(40))
    )
    assert {pages(answer)[0]["text"] for answer in answers} == {"slow page"}
    assert site.asked == ["/slow"]
    assert 'afm_crawl_pages_total{end="read"} 40' in server.metrics()


def test_a_model_sums_up_long_pages_in_chunks(start, site, another_site):
    seen = []

    def model(handler):
        request = json.loads(another_site.bodies[-1])
        seen.append(request)
        text = request["messages"][1]["content"]
        reply = "The Anduin: 1388 miles." if "1388" in text and "Page:" in text else "NOTHING, hills."
        reply = "Together: 1388 miles." if "Notes:" in text else reply
        reply = f"<think>1388, or 1838?</think>\n{reply}"
        return (200, "application/json", json.dumps({"choices": [{"message": {"content": reply}}]}).encode())

    another_site.pages["/v1/chat/completions"] = model
    site.pages["/rivers"] = html(ARTICLE)
    settings = {"trusted": [site.host], "workers": 1, "summary": {"chunk_chars": 4000, "max_chunks": 4}}
    server = start(
        "crawl_page",
        settings,
        SUMMARY_OPENAI_API_BASE_URL=f"{another_site.url}/v1",
        SUMMARY_MODEL="m",
        SUMMARY_OPENAI_API_KEY="sk-very-secret",
    )
    (page,) = pages(server.post("/crawl_page", urls=f"{site.url}/rivers", goal="How long is the Anduin?"))
    assert (page["text"], page["by"]) == ("The Anduin: 1388 miles.", "model")
    assert len(seen) == 4
    assert {headers["Authorization"] for headers in another_site.headers} == {"Bearer sk-very-secret"}
    assert "sk-very-secret" not in json.dumps(seen) + server.log.read_text()
    pages(server.post("/crawl_page", urls=f"{site.url}/rivers", goal="How long is the Anduin?"))
    assert len(seen) == 4
    another_site.pages["/v1/chat/completions"] = (401, "application/json", b"sk-very-secret is wrong")
    (page,) = pages(server.post("/crawl_page", urls=f"{site.url}/rivers", goal="Anduin"))
    assert page["by"] == "passages after key"
    assert "1388" in page["text"]
    another_site.pages["/v1/chat/completions"] = model
    (page,) = pages(server.post("/crawl_page", urls=f"{site.url}/rivers", goal="Anduin"))
    assert page["by"] == "model"  # what stood in for it was not kept
    assert "sk-very-secret" not in server.log.read_text()


@pytest.mark.slow
def test_a_model_that_hangs_does_not_outlast_the_caller(start, site, another_site):
    over = threading.Event()
    another_site.pages["/v1/chat/completions"] = (500, "text/plain", b"")
    site.pages["/rivers"] = html(ARTICLE)
    server = start(
        "crawl_page",
        {"trusted": [site.host], "workers": 1},
        SUMMARY_OPENAI_API_BASE_URL=f"{another_site.url}/v1",
        SUMMARY_MODEL="m",
    )
    pages(server.post("/crawl_page", urls=f"{site.url}/rivers", seconds=60))  # starts a parser
    another_site.pages["/v1/chat/completions"] = lambda handler: (over.wait(60), None)[1]
    began = time.monotonic()
    (page,) = pages(server.post("/crawl_page", urls=f"{site.url}/rivers", goal="Anduin", seconds=PATIENCE_S))
    assert time.monotonic() - began < PATIENCE_S
    assert page["by"] == "passages after timeout"
    assert "1388" in page["text"]
    over.set()


def test_a_reader_service_reads_instead(start, site, another_site):
    def reader(handler):
        answer = {
            "code": 200,
            "data": {"title": "T", "url": handler.path[1:], "content": "read\u202e elsewhere"},
        }
        return (200, "application/json", json.dumps(answer).encode())

    another_site.pages["/http://93.184.215.14/a"] = reader
    another_site.pages["/http://93.184.215.14/html"] = html(b"<p>no JSON</p>")
    another_site.pages["/http://93.184.215.14/list"] = (200, "application/json", b"[1]")
    server = start(
        "crawl_page", {"reader": "jina"}, JINA_BASE_URL=another_site.url, JINA_API_KEY="jina-secret"
    )
    urls = [f"http://93.184.215.14/{name}" for name in ("a?b=1", "html", "list", "gone")] + [
        "http://127.0.0.1/"
    ]
    found = pages(server.post("/crawl_page", urls=urls))
    assert [page["kind"] for page in found] == [None, "broken", "broken", "status", "blocked"]
    assert (found[0]["title"], found[0]["text"]) == ("T", "read elsewhere")
    assert another_site.headers[0]["Authorization"] == "Bearer jina-secret"
    assert "/http://93.184.215.14/a?b=1" in another_site.asked
    assert not any("127.0.0.1" in path for path in another_site.asked)
