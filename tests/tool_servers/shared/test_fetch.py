"""Servers that hang, drip, lie, cut off and flood: bounded time, bounded memory and typed errors."""

from __future__ import annotations

import asyncio
import datetime
import gzip
import ssl
import tracemalloc
import zlib

import pytest

from tool_servers.crawl_page.extract import text_of
from tool_servers.shared.fetch import FetchError, FetchFault, FetchLimits

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMITS = FetchLimits(max_bytes=1 << 20, total_s=60.0, connect_s=60.0, redirects=3)
IMPATIENT = FetchLimits(max_bytes=1 << 20, total_s=1.0, connect_s=0.5, redirects=3)
"""Limits for servers that never finish. On a busy machine, other fetches may take longer than these."""


@pytest.fixture
def fetcher(fetching):
    return fetching(limits=LIMITS)


async def fault_of(fetcher, url="http://example.org/"):
    with pytest.raises(FetchError) as caught:
        await fetcher.fetch(url)
    return caught.value


def always(internet, *chunks, pause_s=0.0):
    async def handler(head, reader, writer):
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(pause_s)
        writer.close()

    internet.handler = handler


async def test_a_page_comes_with_type_charset_and_address(internet, fetcher, answering):
    always(internet, answering("ü".encode("latin-1"), media_type='Text/HTML; Charset="ISO-8859-1"'))
    page = await fetcher.fetch("http://EXAMPLE.org")
    assert (page.url, page.status, page.media_type) == ("http://example.org/", 200, "text/html")
    assert (page.charset, page.body) == ("ISO-8859-1", b"\xfc")


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunks", "pause_s", "fault"),
    [
        ([b""], 300, FetchFault.TIMEOUT),
        ([OK + b"Content-Length: 100\r\n\r\n", *[b"x"] * 100], 0.1, FetchFault.TIMEOUT),
        ([OK, *[b"X-A: b\r\n"] * 100], 0.1, FetchFault.TIMEOUT),
        ([b"HTTP/1.1 103 Early Hints\r\n\r\n"] * 1000, 0.01, FetchFault.TIMEOUT),
        ([OK + b"Content-Length: 100\r\n\r\n" + b"x" * 50], 0, FetchFault.BROKEN),
        ([b""], 0, FetchFault.BROKEN),
        ([b"SSH-2.0-OpenSSH_9.2\r\n"], 0, FetchFault.BROKEN),
        ([OK, *[b"X-A: " + b"b" * 65000 + b"\r\n"] * 100], 0, FetchFault.BROKEN),
        ([OK + b"Content-Length: 1073741824\r\n\r\n"], 5, FetchFault.TOO_LARGE),
        ([OK + b"Content-Type: video/mp4\r\n\r\nx"], 0, FetchFault.TYPE),
        ([b"HTTP/1.1 503 Busy\r\n\r\n"], 0, FetchFault.STATUS),
        ([b"HTTP/1.1 301 Moved\r\nLocation:\r\n\r\n"], 0, FetchFault.REDIRECTS),
        ([b"HTTP/1.1 301 Moved\r\nLocation: http://[\r\n\r\n"], 0, FetchFault.REDIRECTS),
        ([b"HTTP/1.1 301 Moved\r\nLocation: https://exa mple.org/\r\n\r\n"], 0, FetchFault.BLOCKED),
        *[
            ([OK + b"Content-Encoding: %b\r\n\r\nplain text" % coding], 0, FetchFault.BROKEN)
            for coding in (b"gzip", b"deflate", b"br", b"gzip, gzip")
        ],
        ([OK + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(b"hello")[:-9]], 0, FetchFault.BROKEN),
    ],
)
async def test_each_thing_that_a_server_does_wrong_is_a_fault_of_its_kind(
    internet, fetching, chunks, pause_s, fault
):
    always(internet, *chunks, pause_s=pause_s)
    error = await fault_of(fetching(limits=IMPATIENT if fault is FetchFault.TIMEOUT else LIMITS))
    assert error.fault is fault
    if fault is FetchFault.STATUS:
        assert error.status == int(chunks[0].split()[1])


async def test_a_name_without_address_and_a_name_server_that_hangs(internet, fetcher, fetching):
    async def resolve(host, port):
        await asyncio.sleep(300)

    internet.names["none.example.org"] = []
    assert (await fault_of(fetcher, "http://none.example.org")).fault is FetchFault.NAME
    assert (await fault_of(fetching(limits=IMPATIENT, resolve=resolve))).fault is FetchFault.NAME


class Flood:
    """A handler that begins with ``head`` and sends ``piece`` without end; ``sent`` counts bytes."""

    def __init__(self, head, piece):
        self.head, self.piece, self.sent = head, piece, 0

    async def __call__(self, head, reader, writer):
        writer.write(self.head)
        while self.sent < 1 << 30:
            writer.write(self.piece)
            await writer.drain()
            self.sent += len(self.piece)


async def test_a_gigabyte_without_length_is_cut_off(internet, fetcher):
    internet.handler = flood = Flood(HEAD, b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
    assert (await fault_of(fetcher)).fault is FetchFault.TOO_LARGE
    assert flood.sent < 64 << 20


@pytest.mark.parametrize(
    ("begin", "piece", "said"),
    [
        (HEAD, b"1\r\nx\r\n" * 10_000, r"it comes in \d+ pieces for \d+ bytes"),
        (HEAD, b"1;" + b"e" * 30_000 + b"\r\nx\r\n", "it takes more than 2162688 bytes to send"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2_000, "its head is longer than 65536 bytes"),
        (b"HTTP/1.1 200 OK\r\n", b"a:b\r\n" * 10_000, "its head is longer than 65536 bytes"),
    ],
    ids=["one-byte chunks", "long chunk headers", "interim answers", "header lines"],
)
async def test_a_flood_of_little_pieces_is_cut_off(internet, fetching, begin, piece, said):
    """Regression: eight such pages at once delayed all others until they timed out."""
    internet.handler = flood = Flood(begin, piece)
    fetcher = fetching(limits=FetchLimits(max_bytes=1 << 20, total_s=60))
    with pytest.raises(FetchError, match=said) as caught:
        await fetcher.fetch("http://example.org/")
    assert caught.value.fault is FetchFault.BROKEN
    assert flood.sent < 16 << 20  # bytes that were read, and bytes in socket buffers


async def test_other_fetches_take_their_turns_between_little_pieces(internet, fetcher, answering):
    turns = 0

    async def handler(head, reader, writer):
        writer.write(HEAD + b"1\r\nx\r\n" * 4_000 + b"0\r\n\r\n")

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    internet.handler = handler
    other = asyncio.create_task(others())
    assert (await fetcher.fetch("http://example.org/")).body == b"x" * 4_000
    other.cancel()
    assert turns > 4_000 / 40


async def test_a_page_in_pieces_of_a_usual_size_is_read_whole(internet, fetching):
    always(internet, HEAD + (b"200\r\n" + b"x" * 512 + b"\r\n") * 16_000 + b"0\r\n\r\n")
    fetcher = fetching(limits=FetchLimits(max_bytes=10 << 20, total_s=60))
    assert len((await fetcher.fetch("http://example.org/")).body) == 512 * 16_000


async def test_connections_are_used_again_by_later_fetches(internet, fetcher):
    for number in range(3):
        assert (await fetcher.fetch(f"http://example.org/{number}")).body == b"<p>reached</p>"
    assert len(internet.dialled) == 1


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("behind", [b"", b"\0" * 30, b"\r\n"], ids=["nothing", "zeros", "a line end"])
async def test_a_page_of_several_gzip_members_is_read_whole(internet, fetcher, size, behind):
    """Regression: only the first member was read, without an error. Servers that join compressed files send such pages."""
    packed = (
        b"".join(gzip.compress(part, mtime=0) for part in (b"first ", b"", b"second ", b"third")) + behind
    )
    chunks = (packed[at : at + size] for at in range(0, len(packed), size))
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    head = HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n")
    always(internet, head + body + b"0\r\n\r\n")
    assert (await fetcher.fetch("http://example.org/")).body == b"first second third"


@pytest.mark.parametrize(
    ("packed", "fault"),
    [
        (gzip.compress(b"first") + gzip.compress(b"second")[:-6], FetchFault.BROKEN),
        (gzip.compress(b"first") + b"\x1f\x8bno member at all", FetchFault.BROKEN),
        (gzip.compress(b"x") * 1_001, FetchFault.BROKEN),
        (gzip.compress(bytes(300 << 10)) * 4, FetchFault.TOO_LARGE),
    ],
    ids=["cut", "damaged", "too many", "bomb"],
)
async def test_further_gzip_members_are_held_to_the_same_limits(internet, fetcher, answering, packed, fault):
    always(internet, answering(packed, headers=["Content-Encoding: gzip"]))
    assert (await fault_of(fetcher)).fault is fault


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_small_file_that_unpacks_to_a_huge_one(internet, fetcher, answering, coding):
    packer = zlib.compressobj(9, zlib.DEFLATED, 31 if coding == "gzip" else 15)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(128)) + packer.flush()
    always(internet, answering(bomb, headers=[f"Content-Encoding: {coding}"]))
    tracemalloc.start()
    assert (await fault_of(fetcher)).fault is FetchFault.TOO_LARGE
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20


HELLO = gzip.compress(b"hello", mtime=0)


@pytest.mark.parametrize(
    ("coding", "packed"),
    [
        ("gzip", HELLO),
        ("x-gzip", HELLO),
        ("deflate", zlib.compress(b"hello")),
        ("deflate", zlib.compress(b"hello")[2:-4]),
        ("identity", b"hello"),
    ],
)
async def test_compressed_pages(internet, fetcher, answering, coding, packed):
    always(internet, answering(packed, headers=[f"Content-Encoding: {coding}"]))
    assert (await fetcher.fetch("http://example.org/")).body == b"hello"


async def test_redirects_without_end(internet, fetcher, answering):
    always(internet, answering(status="301 Moved", headers=["Location: /again"]))
    assert (await fault_of(fetcher)).fault is FetchFault.REDIRECTS
    assert len(internet.requests) == LIMITS.redirects + 1


async def test_a_redirect_is_followed_to_where_it_leads(internet, fetcher, answering):
    async def handler(head, reader, writer):
        moved = head.startswith(b"GET /old ")
        to = "Location: //other.example.org/n%C3%A9w?x=1"
        writer.write(answering(status="308 Moved", headers=[to]) if moved else answering(b"here"))

    internet.handler = handler
    page = await fetcher.fetch("http://example.org/old")
    assert (page.url, page.body) == ("http://other.example.org/n%C3%A9w?x=1", b"here")


async def test_tls_checks_the_name_while_the_socket_goes_to_the_judged_address(
    internet, fetching, answering, tmp_path
):
    chain = certificate_for("secure.example.org", tmp_path / "chain.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    names = []
    context.sni_callback = lambda sock, name, ctx: names.append(name)
    await internet.stop()
    await internet.start(ssl=context)
    fetcher = fetching(limits=LIMITS, ssl_context=ssl.create_default_context(cafile=chain))
    assert (await fetcher.fetch("https://secure.example.org/")).body == b"<p>reached</p>"
    assert names == ["secure.example.org"]
    assert internet.dialled == [("93.184.215.14", 443)]
    assert (await fault_of(fetcher, "https://other.example.org/")).fault is FetchFault.CONNECT


def certificate_for(name, file):
    """Write a self-signed certificate with its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    ).public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(certificate + private)
    return file


@pytest.mark.parametrize(
    ("body", "charset", "text"),
    [
        ("naïve".encode(), None, "naïve"),
        ("naïve".encode("latin-1"), None, "naïve"),
        ("“x”".encode("cp1252"), "iso-8859-1", "“x”"),
        ("漢字".encode("shift_jis"), "Shift_JIS", "漢字"),
        ("漢字".encode("utf-16"), "utf-8", "漢字"),
        (b'<meta charset="gbk">' + "漢字".encode("gbk"), None, '<meta charset="gbk">漢字'),
        ("naïve".encode(), "no-such-charset", "naïve"),
        (b"aGk=", "base64", "aGk="),
        (b"\\x41", "unicode_escape", "\\x41"),
        (b"a\x00\xff", "utf-8", "a\x00\ufffd"),
    ],
)
def test_text_of_pages_with_right_wrong_and_hostile_charsets(body, charset, text):
    assert text_of(body, charset) == text
