"""The page server over HTTP, with a real web site."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

PATIENCE_S = 10.0
"""Time limit of a client: far longer than a page takes once a parser runs, and far shorter than a hanging answer."""


def paragraphs(of):
    text = f"tells of {of} and of how they came to be, at some length."
    return "".join(f"<p>Paragraph {n} {text}</p>\n" for n in range(150))


ARTICLE = (
    "<html><head><title>Rivers &amp; seas</title><script>alert('tracking')</script></head>"
    f"<body><article><h1>Rivers</h1>{paragraphs('hills and clouds')}"
    "<p>The Anduin is <b>1388</b> miles long, see <a href='/more?x=1'>more</a>.</p>"
    f"{paragraphs('seas and winds')}</article></body></html>"
).encode()


def html(body, status=200):
    return (status, "text/html; charset=utf-8", body)


@pytest.fixture
def server(start, site):
    return start("crawl_page", {"trusted": [site.host], "shown_chars": 1500, "parse_s": 60, "workers": 1})


def pages(response):
    assert response.status_code == 200, response.text
    return response.json()["pages"]


def read(server, url, **more):
    """Read one page."""
    [page] = pages(server.post("/crawl_page", urls=url, **more))
    return page


@pytest.fixture
def rivers(site):
    """Serve a long page; return its address."""
    site.pages["/rivers"] = html(ARTICLE)
    return f"{site.url}/rivers"


def test_a_page_is_read_toward_the_goal_and_cached(server, site, rivers):
    page = read(server, rivers, goal="How long is the Anduin?")
    assert page["title"] == "Rivers & seas"
    assert "1388" in page["text"]
    assert f"[more]({site.url}/more?x=1)" in page["text"]
    assert "alert" not in page["text"]
    assert len(page["text"]) <= 1500
    assert (page["kind"], page["by"], page["cached"]) == (None, "passages", False)
    assert read(server, rivers, goal="hills")["cached"]
    assert site.asked == ["/rivers"]


def test_several_pages_and_each_failure_in_words(server, site):
    wanted = [
        (html(b"<p>first page</p>"), None, "first page"),
        ((200, "application/json", b'{"answer": [42]}'), None, '{\n "answer": [\n  42\n ]\n}'),
        ((200, "application/json", b'{"answer": [42'), None, '{"answer": [42'),
        ((200, "text/plain", "naïve".encode("latin-1")), None, "naïve"),
        (html(b"<script>1</script>"), "parse", "the page holds no readable text"),
        (html(b"oops", status=500), "status", "the server answers with status 500"),
        (
            (200, "video/mp4", b"xxxx"),
            "type",
            "the address leads to a file of type 'video/mp4', which is not read",
        ),
        (moved, "blocked", "169.254.169.254 is not a public address; only public web pages are fetched"),
    ]
    site.pages |= {f"/{number}": answer for number, (answer, _, _) in enumerate(wanted)}
    urls = " | ".join(f"[{number}]({site.url}/{number})" for number in range(len(wanted)))
    found = pages(server.post("/crawl_page", urls=urls))
    assert [(page["kind"], page["text"]) for page in found] == [(kind, text) for _, kind, text in wanted]


def moved(handler):
    handler.send_response(302)
    handler.send_header("Location", "http://169.254.169.254/latest/meta-data/")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


@pytest.mark.slow
def test_a_pdf_and_hostile_files_in_bounded_time(start, site):
    server = start("crawl_page", {"trusted": [site.host], "parse_s": 8, "workers": 1})
    # Five thousand pages that share a drawing of two megabytes.
    endless = pdf(b"BT /F1 12 Tf " + b"1 0 0 1 0 0 Tm () Tj " * 100_000 + b"ET", pages=5000)
    good = pdf(b"BT /F1 12 Tf 72 720 Td (The Anduin is 1388 miles long.) Tj ET")
    files = {
        "/good.pdf": (200, "application/pdf", good),
        "/loop.pdf": (200, "application/pdf", endless),
        "/junk.pdf": (200, "application/pdf", b"%PDF-1.7\n" + bytes(range(256)) * 4000),
        "/deep.html": html(b"<div><b><i>" * 600_000),
        "/table.html": html(b"<table><tr><td>" * 300_000 + b"x"),
        "/attributes.html": html(b"<a " + b"b=c " * 1_000_000 + b">x</a>"),
        "/after.html": html(b"<p>still reading</p>"),
    }
    site.pages |= files
    found = {name: read(server, f"{site.url}{name}") for name in files}
    assert "1388 miles" in found["/good.pdf"]["text"]
    assert found["/loop.pdf"]["kind"] == found["/junk.pdf"]["kind"] == "parse"
    assert found["/loop.pdf"]["text"] == "reading the page took longer than 8 s"
    assert found["/after.html"]["text"] == "still reading"


def pdf(stream, pages=1):
    """Return a PDF whose pages all have this drawing."""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (b" ".join([b"3 0 R"] * pages), pages),
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R"
        b" /Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
    ]
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
    server = start("crawl_page", {"trusted": [site.host], "fetch_s": 600, "workers": 1})
    over = threading.Event()
    site.pages["/slow"] = lambda handler: (over.wait(600), None)[1]
    site.pages["/a"] = html(b"<p>first page</p>")
    urls = [f"{site.url}/slow", f"{site.url}/a"]
    read(server, urls[1])
    slow, fast = pages(server.post("/crawl_page", urls=urls, seconds=PATIENCE_S))
    assert (slow["kind"], fast["text"]) == ("timeout", "first page")
    over.set()


def test_wrong_requests_get_structured_errors(server):
    for body in ({}, {"urls": 5}, {"urls": "x", "seconds": -1}, {"urls": "x" * 200_000}):
        assert server.post("/crawl_page", **body).status_code == 400
    assert server.post("/crawl_page", urls="").json() == {"pages": [], "left_out": 0}
    many = " | ".join(f"http://127.0.0.1/{n}" for n in range(10))
    assert server.post("/crawl_page", urls=many).json()["left_out"] == 2


@pytest.mark.slow
async def test_equal_addresses_at_the_same_time_are_fetched_once(server, site, client):
    site.pages["/slow"] = lambda handler: (time.sleep(0.5), html(b"<p>slow page</p>"))[1]
    answers = await asyncio.gather(
        *(server.apost(client, "/crawl_page", urls=f"{site.url}/slow") for _ in range(40))
    )
    assert {pages(answer)[0]["text"] for answer in answers} == {"slow page"}
    assert site.asked == ["/slow"]
    assert 'afm_crawl_pages_total{end="read"} 40' in server.metrics()


CHAT = "/v1/chat/completions"


@pytest.fixture
def with_model(start, site, another_site):
    """Start page servers that use the model of the other site."""

    def started(**settings):
        return start(
            "crawl_page",
            {"trusted": [site.host], "workers": 1} | settings,
            SUMMARY_OPENAI_API_BASE_URL=f"{another_site.url}/v1",
            SUMMARY_MODEL="m",
            SUMMARY_OPENAI_API_KEY="sk-very-secret",
        )

    return started


@pytest.mark.slow
def test_a_model_sums_up_long_pages_in_chunks(with_model, another_site, rivers):
    seen = []

    def model(handler):
        request = json.loads(another_site.bodies[-1])
        seen.append(request)
        text = request["messages"][1]["content"]
        reply = "The Anduin: 1388 miles." if "1388" in text and "Page:" in text else "NOTHING, hills."
        reply = "Together: 1388 miles." if "Notes:" in text else reply
        reply = f"<think>1388, or 1838?</think>\n{reply}"
        return (200, "application/json", json.dumps({"choices": [{"message": {"content": reply}}]}).encode())

    another_site.pages[CHAT] = model
    server = with_model(summary={"chunk_chars": 4000, "max_chunks": 4})
    for _ in range(2):
        page = read(server, rivers, goal="How long is the Anduin?")
        assert (page["text"], page["by"], len(seen)) == ("The Anduin: 1388 miles.", "model", 4)
    assert {headers["Authorization"] for headers in another_site.headers} == {"Bearer sk-very-secret"}
    assert "sk-very-secret" not in json.dumps(seen)
    another_site.pages[CHAT] = (401, "application/json", b"sk-very-secret is wrong")
    page = read(server, rivers, goal="Anduin")
    assert page["by"] == "passages after key"
    assert "1388" in page["text"]
    another_site.pages[CHAT] = model
    assert read(server, rivers, goal="Anduin")["by"] == "model"  # the passages were not cached
    assert "sk-very-secret" not in server.log.read_text()


@pytest.mark.slow
def test_a_model_that_hangs_does_not_outlast_the_caller(with_model, another_site, rivers):
    over = threading.Event()
    another_site.pages[CHAT] = (500, "text/plain", b"")
    server = with_model()
    read(server, rivers, seconds=60)  # starts a parser
    another_site.pages[CHAT] = lambda handler: (over.wait(600), None)[1]
    page = read(server, rivers, goal="Anduin", seconds=PATIENCE_S)
    assert page["by"] == "passages after timeout"
    assert "1388" in page["text"]
    over.set()


def test_a_reader_service_reads_instead(start, another_site):
    def reader(handler):
        data = {"title": "T", "url": f"{handler.path[1:]}\ud800", "content": "read\u202e elsewhere"}
        return (200, "application/json", json.dumps({"code": 200, "data": data}).encode())

    public = "http://93.184.215.14"
    another_site.pages[f"/{public}/a"] = reader
    another_site.pages[f"/{public}/html"] = html(b"<p>no JSON</p>")
    another_site.pages[f"/{public}/list"] = (200, "application/json", b"[1]")
    server = start(
        "crawl_page", {"reader": "jina"}, JINA_BASE_URL=another_site.url, JINA_API_KEY="jina-secret"
    )
    urls = [f"{public}/{name}" for name in ("a?b=1", "html", "list", "gone")]
    found = pages(server.post("/crawl_page", urls=[*urls, "http://127.0.0.1/"]))
    assert [page["kind"] for page in found] == [None, "broken", "broken", "status", "blocked"]
    assert (found[0]["title"], found[0]["text"]) == ("T", "read elsewhere")
    assert found[0]["url"] == f"{public}/a?b=1\ufffd"  # half a surrogate pair cannot be sent
    assert another_site.headers[0]["Authorization"] == "Bearer jina-secret"
    assert f"/{public}/a?b=1" in another_site.asked
    assert not any("127.0.0.1" in path for path in another_site.asked)
