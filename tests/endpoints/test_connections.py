from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from afm.configuration import validated
from afm.endpoints.chat import EndpointSettings
from afm.endpoints.connections import Connections, HttpClients, Replicas, base_url, server_address
from afm.errors import ConfigError
from afm.models import load_model
from afm.rewards.judge_endpoint import JudgeEndpoint
from tool_servers.shared.upstream import Upstream


class Server:
    """Answers when told to, on as many connections as come."""

    def __init__(self) -> None:
        self.connections = 0
        self.requests = 0
        self.go = asyncio.Event()
        self.asked = asyncio.Semaphore(0)

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                self.requests += 1
                self.asked.release()
                await self.go.wait()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        except asyncio.IncompleteReadError:
            writer.close()


async def ask(clients: HttpClients, url: str) -> int:
    with clients.least_busy() as client:
        return (await client.get(url)).status_code


async def until_asked(server: Server, count: int) -> None:
    async with asyncio.timeout(20):
        for _ in range(count):
            await server.asked.acquire()


@pytest.mark.parametrize(("bounded", "at_once"), [(True, 20), (False, 30)])
async def test_as_many_requests_are_on_their_way_as_may_be(bounded: bool, at_once: int) -> None:
    clients = HttpClients(20, bounded=bounded)
    async with Server() as server:
        asked = [asyncio.create_task(ask(clients, server.url)) for _ in range(30)]
        await until_asked(server, at_once)
        await asyncio.sleep(0.05)
        assert server.connections == server.requests == at_once
        server.go.set()
        assert await asyncio.gather(*asked) == [200] * 30
        await clients.aclose()


@pytest.mark.parametrize("connections", [9, 12, 30, 50, 100])
async def test_no_request_waits_while_another_client_has_room(connections: int) -> None:
    clients = HttpClients(connections)
    async with Server() as server:
        asked = [asyncio.create_task(ask(clients, server.url)) for _ in range(connections)]
        await until_asked(server, connections)
        server.go.set()
        assert await asyncio.gather(*asked) == [200] * connections
        await clients.aclose()


async def test_requests_in_turn_share_one_connection() -> None:
    clients = HttpClients(64)
    async with Server() as server:
        server.go.set()
        for _ in range(5):
            assert await ask(clients, server.url) == 200
        assert (server.requests, server.connections) == (5, 1)
        await clients.aclose()


async def test_a_failed_request_gives_its_place_back() -> None:
    clients = HttpClients(1)
    with pytest.raises(httpx.ConnectError):
        await ask(clients, "http://127.0.0.1:9")
    async with Server() as server:
        server.go.set()
        assert await ask(clients, server.url) == 200
    await clients.aclose()
    with clients.least_busy() as client, pytest.raises(RuntimeError, match="closed"):
        await client.get("http://127.0.0.1:9")


def test_clients_of_ended_event_loops_are_let_go() -> None:
    connections = Connections(64, bounded=False)

    async def one_request() -> None:
        async with Server() as server:
            server.go.set()
            with connections.client() as client:
                assert (await client.get(server.url)).status_code == 200

    for _ in range(5):
        asyncio.run(one_request())
    assert len(connections._loops) == 1


@pytest.mark.parametrize("key", ["schl\u00fcssel", "two\nlines", " padded", "nu\0ll"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="MY_KEY: expected printable ASCII") as caught:
        Connections(1, key=key, key_name="MY_KEY")
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["ftp://me:secret@a", "http://", "http://me:secret@a:99999", "http://me:secret@a", "a:1"]
)
def test_addresses_of_servers_have_a_host_a_port_and_no_password(url: str) -> None:
    with pytest.raises(ConfigError, match="urls: ") as caught:
        server_address(url, "/run", "TOKEN", "http://a:1")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://me:secret@a/v1", "https://a/v1?key=secret"])
def test_the_error_about_a_secret_in_an_address_does_not_show_it(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRM_BASE_URL", url)
    for use in (
        lambda: validated(EndpointSettings, {"url": url}, "judge.yaml"),
        lambda: JudgeEndpoint().place(),
        lambda: Upstream("the model", url),
        lambda: load_model(url, tokenizer=tmp_path),
    ):
        with pytest.raises(
            ConfigError, match=r"http.*\*\*\*.* expected an address without user, pass"
        ) as caught:
            use()
        assert "secret" not in str(caught.value)


def test_the_least_busy_server_is_asked_and_one_that_failed_last(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas(["a", "b", "c"])
    with replicas.next().busy(), replicas.next().busy():
        assert [replicas.next().url for _ in range(2)] == ["c", "c"]
    failing = replicas.next()
    with pytest.raises(RuntimeError), failing.busy():
        raise RuntimeError
    others = {"a", "b", "c"} - {failing.url}
    assert {replicas.next().url for _ in range(30)} == others
    with replicas.next().busy(), replicas.next().busy():
        assert replicas.next().url in others  # though the failed one has nothing to do
    with pytest.raises(ValueError), failing.busy(ValueError):
        raise ValueError  # an error of a server in order
    assert failing.resting
    with monkeypatch.context() as patch:
        patch.setattr("afm.endpoints.connections.REST_S", 0.0)
        assert not failing.resting  # it is tried again
    with failing.busy():
        pass  # it works again
    with pytest.raises(ValueError), failing.busy(ValueError):
        raise ValueError
    assert not failing.resting
    assert {replicas.next().url for _ in range(30)} == {"a", "b", "c"}


def test_addresses_are_completed():
    for path in ("", "/", "/v1", "/v1/", "/v1/completions", "/v1/chat/completions"):
        assert base_url(f"http://a:1{path}") == "http://a:1/v1"
