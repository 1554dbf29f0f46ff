import socket

import httpx
import pytest
import requests
from tool_server import ROOT, ToolServer, running

from afm.errors import ConfigError
from afm.settings import Environment
from tool_servers.shared.command import (
    KINDS,
    MIN_TOKEN,
    Address,
    ServerSettings,
    check_exposure,
    parse_launch,
)
from tool_servers.shared.endpoint import Endpoint

LONG = "a" * MIN_TOKEN
TEXT = "text/plain"


@pytest.fixture
def serve_page_reader(tmp_path):
    """Start page readers with these variables; return their addresses."""
    cache = tmp_path / "web.sqlite"
    with running(ToolServer, tmp_path) as start:
        yield lambda **variables: start("crawl_page", WEB_CACHE=cache, **variables).url


def test_no_page_in_a_browser_can_use_a_server_that_asks_for_no_token(serve_page_reader):
    """Requests that a browser sends for a page of another site: DNS rebinding, a form, or a script."""
    url = serve_page_reader()
    place = f"{url}/crawl_page"
    port = url.rpartition(":")[2]

    def status(body=b"{}", **headers):
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        return httpx.post(place, content=body, headers=named, trust_env=False, timeout=30).status_code

    json_type = {"Content_Type": "application/json"}
    for host in ("evil.example", f"127.0.0.1.evil.example:{port}", "localhost.evil"):
        assert status(**json_type, Host=host) == 421
    assert httpx.get(f"{url}/health", headers={"Host": "evil.example"}, trust_env=False).status_code == 421
    for origin in ("http://evil.example", "https://127.0.0.1.evil.example", "null", "http://localhost@evil"):
        assert status(**json_type, Origin=origin) == 403
    for form in (TEXT, "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        assert status(Content_Type=form) == 415
    assert status(Content_Type="text/plain; application/json") == 415
    assert status() == 415
    for host, origin in (
        (f"localhost:{port}", f"http://localhost:{port}"),
        (f"[::1]:{port}", "https://[::1]:3000"),
        ("127.0.0.1", "http://127.0.0.1"),
    ):
        assert status(**json_type, Host=host, Origin=origin) not in (403, 415, 421)
    assert status(Content_Type="application/json; charset=utf-8") not in (403, 415, 421)
    assert requests.post(place, json={}).status_code not in (403, 415, 421)


def test_the_mcp_server_keeps_pages_in_a_browser_out_by_the_same_rules(tmp_path):
    """The library's own check of host names is off."""
    with running(ToolServer, tmp_path) as start:
        place = start("mcp", "--http", "--tools", ROOT / "configs/tools/code_executor.yaml").url + "/mcp"
        json_type = {"Content-Type": "application/json"}
        for headers, status in (
            (json_type | {"Host": "evil.example"}, 421),
            (json_type | {"Origin": "http://evil.example"}, 403),
            ({"Content-Type": TEXT}, 415),
        ):
            answer = httpx.post(place, content=b"{}", headers=headers, trust_env=False, timeout=30)
            assert answer.status_code == status
        assert httpx.post(place, json={}, trust_env=False, timeout=30).status_code not in (403, 415, 421)


def test_a_server_with_a_token_answers_under_any_name(serve_page_reader):
    """No page knows the token, and a server behind a proxy has another name."""
    place = f"{serve_page_reader(WEB_SERVER_TOKEN=LONG)}/crawl_page"
    names = {"Host": "tools.example", "Origin": "https://team.example"}
    token, body = {"Authorization": f"bearer {LONG}"}, {"urls": "http://127.0.0.1/", "goal": ""}
    answer = httpx.post(place, json=body, headers=names | token, trust_env=False)
    assert answer.json()["pages"][0]["kind"] == "blocked"
    assert httpx.post(place, json=body, headers=names, trust_env=False).status_code == 401


@pytest.mark.parametrize(
    ("given", "well"),
    [
        (f"bearer   {LONG}", True),
        (f"Bearer {LONG}x", False),
        (f"Basic {LONG}", False),
        (f"Bearer{LONG}", False),
        ("Bearer \u00e9", False),
        ("", False),
    ],
)
def test_the_scheme_of_a_token_is_read_in_any_letter_case(given, well):
    for token, lets_in in ((LONG, well), (None, True)):
        assert Endpoint("test", ServerSettings(), token=token).allows({"authorization": given}) is lets_in


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
@pytest.mark.parametrize("token", [None, "x", LONG])
def test_this_machine_alone_needs_no_token(host, token):
    check_exposure(host, token, "SOME_TOKEN")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "node7"])
def test_other_machines_come_in_only_by_a_token_that_is_hard_to_guess(host):
    check_exposure(host, LONG, "SOME_TOKEN")
    for token, said in (
        (None, "needs a token; set SOME_TOKEN"),
        (LONG[1:], "needs a longer token, got 15 characters"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_exposure(host, token, "SOME_TOKEN")


@pytest.mark.parametrize("name", KINDS)
def test_no_server_listens_to_other_machines_without_its_token(name):
    launch = parse_launch(name, ["--host", "0.0.0.0"], Environment.model_construct())
    with pytest.raises(ConfigError, match=f"needs a token; set {KINDS[name].token} to"):
        launch.address()


def test_an_address_without_a_valid_port_is_named():
    launch = parse_launch(
        "wiki_search", [], Environment(wiki_rag_server_url="http://127.0.0.1:port/retrieve")
    )
    message = r"WIKI_RAG_SERVER_URL: Port could not be cast .*, got 'http://127.0.0.1:port/retrieve'; expected http://HOST"
    with pytest.raises(ConfigError, match=message):
        launch.address()


@pytest.mark.parametrize("host", ["203.0.113.7", "nowhere.invalid"])
def test_an_address_of_no_device_here_is_answered_with_those_that_are(host):
    with pytest.raises(
        ConfigError, match=rf"cannot listen on {host}, port 0: .*; choose another --host: 127.0.0.1 for"
    ):
        Address(host, 0, "0123456789abcdef").listen()


def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_head():
    """Regression: requests took 40 ms longer when connections did not inherit TCP_NODELAY."""
    with (
        Address("127.0.0.1", 0, None).listen() as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
