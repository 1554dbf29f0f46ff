"""Addresses that must not be reached, each with a similar public address that must be reachable."""

from __future__ import annotations

import contextlib
import itertools
import socket
from ipaddress import ip_address

import pytest

from tool_servers.shared.fetch import Fetcher, FetchError, FetchFault
from tool_servers.shared.url_guard import BlockedError, Policy, check_address, target_of

# (an address that must not be reached, a similar public one that must be reachable)
PAIRS = [
    # plain private and special IPv4
    ("http://127.0.0.1/", "http://128.0.0.1/"),
    ("http://0.0.0.0/", "http://1.0.0.0/"),
    ("http://10.1.2.3/", "http://11.1.2.3/"),
    ("http://169.254.169.254/latest/meta-data/", "http://169.253.169.254/latest/meta-data/"),
    ("http://168.63.129.16/", "http://168.63.129.17/"),
    ("http://100.64.0.1/", "http://100.63.0.1/"),
    ("http://192.0.0.192/", "http://192.0.1.192/"),
    ("http://192.88.99.1/", "http://192.88.98.1/"),
    ("http://224.0.0.1/", "http://223.0.0.1/"),
    ("http://240.0.0.1/", "http://223.255.255.1/"),
    # other ways to write IPv4
    ("http://2130706433/", "http://134744072/"),
    ("http://0x7f000001/", "http://0x08080808/"),
    ("http://0X7F.0.0.1/", "http://0X8.8.8.8/"),
    ("http://0177.0.0.1/", "http://010.8.8.8/"),
    ("http://0x7f.1/", "http://0x8.1/"),
    ("http://127.1/", "http://8.1/"),
    ("http://127.0.0.1./", "http://8.8.8.8./"),
    ("http://%31%32%37.0.0.1/", "http://%38.8.8.8/"),
    ("http://１２７.０.０.１/", "http://８.８.８.８/"),
    ("http://127。0。0。1/", "http://8。8。8。8/"),
    ("http://①②⑦.⓪.⓪.①/", "http://⑧.⑧.⑧.⑧/"),
    ("http://０x７f.1/", "http://０x８.1/"),
    # IPv6
    ("http://[::1]/", "http://[2606:4700::1]/"),
    ("http://[fe80::1]/", "http://[2a00:1450::1]/"),
    ("http://[fe80::1%25eth0]/", "http://[2a00:1450::2]/"),
    ("http://[fc00::1]/", "http://[2c00::1]/"),
    ("http://[ff02::1]/", "http://[2402::1]/"),
    ("http://[2001:db8::1]/", "http://[2001:db9::1]/"),
    ("http://[2001:10::1]/", "http://[2001:200::1]/"),
    ("http://[3fff::1]/", "http://[3ffd::1]/"),
    # IPv4 inside IPv6
    ("http://[::ffff:127.0.0.1]/", "http://[::ffff:8.8.8.8]/"),
    ("http://[::127.0.0.1]/", "http://[::8.8.8.8]/"),
    ("http://[64:ff9b::10.0.0.1]/", "http://[64:ff9b::8.8.8.8]/"),
    ("http://[64:ff9b:1::a00:1]/", "http://[64:ff9b::808:404]/"),
    ("http://[2002:7f00:1::1]/", "http://[2002:808:808::1]/"),
    ("http://[2001:0:808:808::80ff:fffe]/", "http://[2001:0:808:808::f7f7:f7f7]/"),
    ("http://[2001:0:7f00:1::f7f7:f7f7]/", "http://[2001:0:808:404::f7f7:f7f7]/"),
    ("http://[2a00::5efe:10.0.0.1]/", "http://[2a00::5efe:8.8.8.8]/"),
    ("http://[2a00::200:5efe:192.168.0.1]/", "http://[2a00::200:5efe:8.8.8.8]/"),
    # names
    ("http://localhost/", "http://localhost.example.org/"),
    ("http://LOCALHOST./", "http://Example.ORG./"),
    ("http://ｌｏｃａｌｈｏｓｔ/", "http://ｅｘａｍｐｌｅ.org/"),
    ("http://a.localhost/", "http://a.localhost.org/"),
    ("http://metadata.google.internal/", "http://metadata.google.com/"),
    ("http://router/", "http://router.net/"),
    ("http://loopback.example.org/", "http://loop.example.org/"),
    ("http://mixed.example.org/", "http://two.example.org/"),
    ("http://mapped.example.org/", "http://six.example.org/"),
    ("http://scoped.example.org/", "http://sixth.example.org/"),
    # ambiguous hosts
    ("http://example.org@127.0.0.1/", "http://127.0.0.1@example.org/"),
    ("http://a@example.org@10.0.0.1/", "http://a@10.0.0.1@example.org/"),
    ("http://127.0.0.1\\@example.org/", "http://example.org/@127.0.0.1/"),
    ("http://127.0.0.1#@example.org/", "http://example.org#@127.0.0.1/"),
    ("http://exa mple.org/", "http://example.org/a%20b"),
    ("http://127.0.0.1\t.example.org/", "http://127-0-0-1.example.org/"),
    ("http://example.org%00.127.0.0.1/", "http://example.org/%00"),
    ("http://example.org\u200b/", "http://example.org/\u00e9"),
    ("http://256.1.1.1/", "http://25.1.1.1/"),
    ("http://08.8.8.8/", "http://8.8.8.8/"),
    ("http:///127.0.0.1/", "http://8.8.4.4/"),
    ("http:127.0.0.1/", "http://8.8.4.5/"),
    # ports and schemes
    ("http://example.org:22/", "http://example.org:8080/"),
    ("http://example.org:0/", "http://example.org:/"),
    ("http://example.org:65616/", "http://example.org:0080/"),
    ("http://example.org:-80/", "http://example.org:8443/"),
    ("file:///etc/passwd", "http://example.org/file:///etc/passwd"),
    ("ftp://example.org/", "HTTP://example.org/"),
    ("javascript:alert(1)", "http://example.org/javascript:alert(1)"),
    ("//127.0.0.1/", "http://example.org//127.0.0.1/"),
    ("http://example.org/" + "a" * 5000, "http://example.org/" + "a" * 4000),
]

NAMES = {
    "loopback.example.org": ["127.0.0.1"],
    "mixed.example.org": ["93.184.215.14", "10.0.0.1"],
    "two.example.org": ["93.184.215.14", "93.184.215.15"],
    "mapped.example.org": ["::ffff:169.254.169.254"],
    "six.example.org": ["::ffff:8.8.8.8"],
    "scoped.example.org": ["fe80::1%1"],
    "sixth.example.org": ["2606:4700::1"],
}


@pytest.fixture
def fetcher(internet, fetching):
    internet.names.update(NAMES)
    return fetching()


async def assert_blocked(fetcher, url, match=None):
    with pytest.raises(FetchError, match=match) as caught:
        await fetcher.fetch(url)
    assert caught.value.fault is FetchFault.BLOCKED


@pytest.mark.parametrize("url", [bad for bad, _ in PAIRS], ids=lambda url: ascii(url[:50]))
async def test_private_addresses_and_tricks_are_never_reached(internet, fetcher, url):
    await assert_blocked(fetcher, url)
    assert internet.dialled == internet.requests == []


@pytest.mark.parametrize("url", [good for _, good in PAIRS], ids=lambda url: ascii(url[:50]))
async def test_public_look_alikes_are_reached(internet, fetcher, url):
    assert (await fetcher.fetch(url)).body == b"<p>reached</p>"
    (dialled,) = internet.dialled
    check_address(ip_address(dialled[0]))


@pytest.mark.parametrize("url", [bad for bad, _ in PAIRS], ids=lambda url: ascii(url[:50]))
async def test_a_redirect_leads_to_none_of_them_either(internet, fetcher, answering, url):
    location = url.encode()  # raw bytes, as a hostile server would send them
    moved = answering(status="302 Found", headers=["Location: @"]).replace(b"@", location)

    async def redirect(head, reader, writer):
        start = head.startswith(b"GET /start ")
        writer.write(moved if start else answering(b"a page of the public host"))

    internet.handler = redirect
    with contextlib.suppress(FetchError):  # a relative address, "javascript:", may be one of the public host
        await fetcher.fetch("http://start.example.org/start")
    assert {address for address, _ in internet.dialled} == {"93.184.215.14"}


async def test_a_name_that_changes_its_address_is_judged_for_every_connection(internet, fetcher, answering):
    turns = itertools.cycle([["93.184.215.14"], ["127.0.0.1"]])
    internet.names["rebind.example.org"] = lambda: next(turns)

    async def close_after(head, reader, writer):
        writer.write(answering(b"once", headers=["Connection: close"]))
        await writer.drain()
        writer.close()

    internet.handler = close_after
    assert (await fetcher.fetch("http://rebind.example.org/")).body == b"once"
    await assert_blocked(fetcher, "http://rebind.example.org/", "not a public address")
    assert internet.dialled == [("93.184.215.14", 80)]
    assert internet.lookups == ["rebind.example.org"] * 2


async def test_the_judged_address_is_dialled_and_the_name_is_sent(internet, fetcher):
    await fetcher.fetch("http://user:secret@two.example.org:8080/a?b=c#d")
    assert internet.dialled == [("93.184.215.14", 8080)]
    head = internet.requests[0].decode()
    assert head.startswith("GET /a?b=c HTTP/1.1\r\nHost: two.example.org:8080\r\n")
    assert "secret" not in head


async def test_a_second_address_is_tried_when_the_first_is_dead(internet, fetching):
    import httpcore

    async def dial(address, port, timeout_s):
        if address == "93.184.215.14":
            internet.dialled.append((address, port))
            raise httpcore.ConnectError("dead")
        return await internet.dial(address, port, timeout_s)

    internet.names.update(NAMES)
    await fetching(dial=dial).fetch("http://two.example.org/")
    assert [address for address, _ in internet.dialled] == ["93.184.215.14", "93.184.215.15"]


async def test_only_the_very_host_and_port_that_is_trusted_is_exempt(internet, fetching):
    internet.names["wiki"] = ["10.0.0.7"]
    fetcher = fetching(Policy(trusted=["wiki:9876", "127.0.0.1:9877", "[::1]:9878"]))
    for url in ("http://wiki:9876/", "http://127.0.0.1:9877/", "http://0x7f.1:9877/", "http://[::1]:9878/"):
        assert (await fetcher.fetch(url)).body == b"<p>reached</p>"
    assert {address for address, _ in internet.dialled} == {"10.0.0.7", "127.0.0.1", "::1"}
    reached = len(internet.requests)
    for url in ("http://wiki:80/", "http://127.0.0.1:9876/", "http://a.wiki:9876/", "http://localhost:9877/"):
        await assert_blocked(fetcher, url)
    assert len(internet.requests) == reached


async def test_a_trusted_pair_may_be_this_machine_on_its_network_and_be_written_in_any_case(internet):
    own = ip_address("127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        own = ip_address(probe.getsockname()[0])
    if own.is_loopback:
        pytest.skip("needs a network interface beside the loopback")
    await internet.stop()
    await internet.start("0.0.0.0")
    port = internet.port
    for pair, host in ((f"{own}:{port}", own), (f"LocalHost:{port}", "localhost")):
        fetcher = Fetcher(Policy(trusted=(pair,)))
        assert (await fetcher.fetch(f"http://{host}:{port}/")).body == b"<p>reached</p>"
        await fetcher.close()


@pytest.mark.parametrize(
    "end", ["svc", "consul", "localdomain", "private", "home", "in-addr.arpa", "ip6.arpa"]
)
def test_names_of_private_places_are_closed_and_names_like_them_are_not(end):
    with pytest.raises(BlockedError, match="private name"):
        target_of(f"http://db.{end}/", Policy())
    assert target_of(f"http://db{end}.org/", Policy()).host == f"db{end}.org"


async def test_what_another_reader_would_fetch_is_judged_the_same_way(internet, fetcher):
    await fetcher.check("http://example.org/")
    internet.names["gone.example.org"] = []
    await fetcher.check("http://gone.example.org/")
    for url in ("http://127.0.0.1/", "http://loopback.example.org/", "file:///etc/passwd"):
        with pytest.raises(FetchError) as caught:
            await fetcher.check(url)
        assert caught.value.fault is FetchFault.BLOCKED
    assert internet.dialled == []


async def test_the_systems_resolver_and_dialler_are_guarded_too():
    fetcher = Fetcher()
    for url in ("http://127.0.0.1/", "http://localhost:8080/", "http://[::1]/"):
        await assert_blocked(fetcher, url)
    await fetcher.close()


def test_the_normal_form_has_no_user_name_no_fragment_and_no_odd_bytes():
    target = target_of(" http://u:p@EXAMPLE.org:80/a\u00e9?b=\u00fc#frag ", Policy())
    assert target.url == "http://example.org/a%C3%A9?b=%C3%BC"
    assert target_of("https://b\u00fccher.example.org", Policy()).url == "https://xn--bcher-kva.example.org/"
    assert target_of("http://[2606:4700::1]:8080/", Policy()).authority == "[2606:4700::1]:8080"


@pytest.mark.parametrize(
    "address", ["fe80::1%eth0", "::2", "64:ff9b:1::808:808", "2002:a00:1::", "::ffff:0:0"]
)
def test_addresses_that_wrap_private_ones_do_not(address):
    with pytest.raises(BlockedError):
        check_address(ip_address(address))
