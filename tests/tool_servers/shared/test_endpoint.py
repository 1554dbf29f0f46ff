"""The handling of requests in all servers: refusals in one form, time limit of the body, bounded queue, metrics."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from pydantic import BaseModel

from afm.errors import DataError
from tool_servers.shared.command import ServerSettings
from tool_servers.shared.endpoint import Endpoint, closing, json_body
from tool_servers.shared.upstream import Trouble, UpstreamError

KEY = {"Authorization": "Bearer a-token"}


class Question(BaseModel):
    q: str


async def work(question):
    match question.q:
        case "slow":
            await asyncio.sleep(300)
        case "data":
            raise DataError("a wrong question")
        case "upstream":
            raise UpstreamError(Trouble.BUSY, "too many")
        case "budget":
            raise UpstreamError(Trouble.BUDGET, "used up")
        case "fault":
            raise KeyError("a-secret")
        case "own form":
            Question.model_validate({"q": 1})
        case "own clock":
            raise TimeoutError
    return {"answer": question.q}


async def close():
    pass


def client(*, token=None, body_s=15.0, work_s=0.5, **limits):
    endpoint = Endpoint(
        "try", ServerSettings(**limits), token=token, max_bytes=100, body_s=body_s, work_s=work_s
    )
    app = endpoint.app(endpoint.post("/ask", json_body(Question), work), life=closing(close))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


async def test_unknown_paths_and_methods_are_errors_in_json():
    async with client() as server:
        assert (await server.post("/ask", json={"q": "x"})).json() == {"answer": "x"}
        unknown, wrong = await server.get("/other"), await server.get("/ask")
    assert unknown.json() == {"error": "GET /other: Not Found", "kind": "request"}
    assert (unknown.status_code, wrong.status_code) == (404, 405)
    assert wrong.json()["error"] == "GET /ask: Method Not Allowed"


@pytest.mark.parametrize(
    ("content", "status", "kind"),
    [
        (b"{", 400, "request"),
        (b'{"q": 1}', 400, "request"),
        (b'{"q": "data"}', 400, "request"),
        (b'{"q": "budget"}', 402, "budget"),
        (b'{"q": "' + b"x" * 100 + b'"}', 413, "too_large"),
        (b'{"q": "fault"}', 500, "server"),
        (b'{"q": "own form"}', 500, "server"),
        (b'{"q": "upstream"}', 502, "busy"),
        (b'{"q": "slow"}', 503, "timeout"),
    ],
)
async def test_each_failure_has_its_status_and_is_counted(content, status, kind):
    async with client() as server:
        answer = await server.post("/ask", content=content)
        numbers = (await server.get("/metrics")).text
    assert (answer.status_code, answer.json()["kind"]) == (status, kind)
    assert "a-secret" not in answer.text
    assert f'afm_try_requests_total{{outcome="{kind}"}} 1.0' in numbers


async def test_a_time_limit_inside_the_work_is_a_fault_of_a_server_that_sets_none():
    async with client(work_s=None) as server:
        answer = await server.post("/ask", json={"q": "own clock"})
    assert (answer.status_code, answer.json()["kind"]) == (500, "server")


async def test_a_body_that_does_not_come_is_answered_408():
    async def trickle():
        yield b"{"
        await asyncio.sleep(300)
        yield b"}"

    async with client(body_s=0.1) as server:
        answer = await server.post("/ask", content=trickle())
    assert (answer.status_code, answer.json()["kind"]) == (408, "slow")
    assert answer.json()["error"] == "the request did not arrive within 0.1 s"


async def test_the_token_is_asked_of_everything_but_health():
    async with client(token="a-token") as server:
        for wrong in ({}, {"Authorization": "Bearer a-tokem"}):
            assert (await server.post("/ask", json={"q": "x"}, headers=wrong)).status_code == 401
            assert (await server.get("/metrics", headers=wrong)).status_code == 401
        assert (await server.post("/ask", json={"q": "x"}, headers=KEY)).status_code == 200
        health = {"status": "ok", "running": 0, "waiting": 0}
        assert (await server.get("/health")).json() == health
        numbers = (await server.get("/metrics", headers=KEY)).text
    for line in ('requests_total{outcome="ok"} 1.0', 'requests_total{outcome="token"} 4.0', "running 0.0"):
        assert f"afm_try_{line}" in numbers
    assert "afm_try_request_seconds_count 1.0" in numbers


async def test_a_key_that_cannot_be_read_hears_that_the_server_is_ill_and_not_why():
    class Picky(Endpoint):
        def allows(self, headers):
            raise DataError("API key: got nonsense")

    async def trouble():
        return "the disk is full"

    app = Picky("try", ServerSettings(), token="a-token").app(life=closing(close), trouble=trouble)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as server:
        answer = await server.get("/health")
    assert (answer.status_code, answer.json()) == (503, {"status": "failing", "running": 0, "waiting": 0})


async def test_beyond_its_places_a_server_says_when_to_come_back():
    async with client(max_parallel=1, max_waiting=1, max_wait_s=1, work_s=2) as server:
        answers = await asyncio.gather(*(server.post("/ask", json={"q": "slow"}) for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [429, 429, 429, 503]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 429)
    messages = {answer.json()["error"] for answer in answers if answer.status_code == 429}
    assert messages == {"1 running, 1 waiting", "waited 1 s, 1 still running"}
