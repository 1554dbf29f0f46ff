"""The one chat client, against a real HTTP server on the loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from loopback import LoopbackServer

from afm.endpoints.budget import Budget, BudgetSettings, Spent, TokenPrice
from afm.endpoints.chat import CallReport, ChatEndpoint, EndpointSettings
from afm.endpoints.pace import TryAgainError
from afm.errors import BudgetSpentError, ConfigError, EngineError, RefusedError

KEY = "sk-endpoint-secret"
BODY = {"model": "m", "messages": [{"role": "user", "content": "x" * 300}], "max_tokens": 50}
PRICE = TokenPrice(prompt=10_000, completion=20_000)


def chat(content: Any, finish: str = "stop", **usage: int) -> JSONResponse:
    choice = {"message": {"content": content}, "finish_reason": finish}
    return JSONResponse({"choices": [choice], **({"usage": usage} if usage else {})})


class Server(LoopbackServer):
    """Answers with ``answers``, then with "hi" of 100 and 2 tokens."""

    def __init__(self) -> None:
        self.answers: list[Response] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        app = FastAPI()
        app.post("/v1/chat/completions", response_model=None)(self.completions)
        super().__init__(app)

    async def completions(self, request: Request) -> Response:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
        if self.answers:
            return self.answers.pop(0)
        return chat("hi", prompt_tokens=100, completion_tokens=2, total_tokens=102)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    server = Server().start()
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("MY_KEY", KEY)
    for recorded in (shared_server.answers, shared_server.requests, shared_server.headers):
        recorded.clear()
    return shared_server


async def ask(server: Server, budget: Budget | None = None, reads: Any = None, **options: Any) -> str:
    names = ("finishes", "price", "log", "on_call")
    asking = {name: options.pop(name) for name in names if name in options}
    settings = EndpointSettings(**({"key_variable": "MY_KEY", "attempts": 2} | options))
    endpoint = ChatEndpoint(settings, server.origin, budget)
    try:
        async with asyncio.timeout(30):
            return await endpoint.ask(BODY, reads or (lambda reply: reply.text), **asking)
    finally:
        await endpoint.close()


async def test_one_request_carries_the_key_in_its_header_alone(server: Server) -> None:
    assert await ask(server) == "hi"
    assert server.requests == [BODY]
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (PlainTextResponse("overloaded", status_code=503), "status 503: overloaded (after 1 attempt)"),
        (PlainTextResponse(f"no such key: {KEY}", status_code=401), "status 401: no such key: ***"),
        (PlainTextResponse("<html>"), "the answer is not a chat completion"),
        (JSONResponse({"choices": []}), "the answer is not a chat completion"),
        (chat(None), "the reply is incomplete"),
        (chat("half", "length"), "the reply is incomplete (finish reason 'length')"),
        (PlainTextResponse("no gzip", headers={"Content-Encoding": "gzip"}), "the reply is compressed"),
        (PlainTextResponse("no gzip", 500, headers={"Content-Encoding": "gzip"}), "status 500: no gzip"),
        (PlainTextResponse("[" * 200_000), "the answer is not a chat completion"),
        (PlainTextResponse(" " * (1 << 21)), "the reply is too long"),
    ],
)
async def test_failures_say_what_came_and_never_the_key(server: Server, answer: Response, words: str) -> None:
    server.answers.append(answer)
    with pytest.raises(EngineError) as caught:
        await ask(server, attempts=1)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{server.origin}/v1/chat/completions: ")
    assert KEY not in str(caught.value)


@pytest.mark.slow
async def test_what_may_pass_is_repeated_and_a_refusal_is_not(server: Server) -> None:
    server.answers += [PlainTextResponse("busy", 429, headers={"Retry-After": "0.2"}), chat("?")]
    started = time.monotonic()

    def read(reply: Any) -> str:
        if reply.text == "?":
            raise TryAgainError("not what was asked for")
        return str(reply.text)

    assert await ask(server, reads=read, attempts=3) == "hi"
    assert time.monotonic() - started >= 0.2
    assert len(server.requests) == 3
    server.answers.append(PlainTextResponse("unknown model", 404))
    with pytest.raises(RefusedError, match="status 404: unknown model"):
        await ask(server)
    assert len(server.requests) == 4


async def test_a_reply_that_stays_useless_is_refused_unless_its_finish_is_taken(server: Server) -> None:
    server.answers += [chat("half", "length")] * 3
    with pytest.raises(RefusedError, match="finish reason 'length'"):
        await ask(server)
    assert await ask(server, finishes=("stop", "length")) == "half"


async def test_a_reply_that_drips_ends_with_the_time_limit(server: Server) -> None:
    async def drops() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" "
            await asyncio.sleep(0.1)

    server.answers.append(StreamingResponse(drops()))
    with pytest.raises(EngineError, match=r"ReadTimeout: no whole reply within 0\.5 s"):
        await ask(server, timeout_s=0.5, attempts=1)


async def test_a_flood_is_cut_off(server: Server) -> None:
    sent = 0

    async def flood() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1
            yield b" " * (1 << 18)
            await asyncio.sleep(0.001)  # the server notices that nobody listens any more

    server.answers.append(StreamingResponse(flood()))
    with pytest.raises(EngineError, match="the reply is too long"):
        await ask(server, attempts=1)
    assert sent < 500


async def test_each_request_is_reported_and_paid_for_once(server: Server) -> None:
    reports: list[CallReport] = []
    budget = Budget(BudgetSettings(calls=3, usd=100))
    server.answers += [
        PlainTextResponse("down", 500),
        chat("half", "length", prompt_tokens=90, completion_tokens=50),
    ]
    assert await ask(server, budget, attempts=3, price=PRICE, on_call=reports.append) == "hi"
    assert [(bool(report.fault), report.tokens) for report in reports] == [
        (True, 0),
        (True, 140),
        (False, 102),
    ]
    assert [report.usd for report in reports] == pytest.approx([0, 1.9, 1.04])
    with pytest.raises(BudgetSpentError, match=r"3 of 3 calls, 2\.9400 of 100 USD"):
        await ask(server, budget, price=PRICE)
    assert len(server.requests) == 3


async def test_what_a_server_does_not_report_is_estimated(server: Server) -> None:
    reports: list[CallReport] = []
    server.answers += [chat("x" * 9), chat("x", total_tokens=130)]
    for _ in range(2):
        await ask(server, on_call=reports.append)
    assert [(report.prompt_tokens, report.completion_tokens) for report in reports] == [(100, 4), (100, 30)]
    assert not any(report.reply and report.reply.metered for report in reports)


async def test_a_log_counts_for_the_budget_and_on_call_keeps_it(server: Server) -> None:
    log = Spent(tokens=800)
    budget = Budget(BudgetSettings(tokens=1000))

    def record(report: CallReport) -> None:
        log.tokens += report.tokens

    assert await ask(server, budget, log=log, on_call=record) == "hi"
    with pytest.raises(BudgetSpentError, match="902 of 1000 tokens"):
        await ask(server, budget, log=log, on_call=record)


async def test_a_request_that_no_minute_allows_is_refused_and_not_counted(server: Server) -> None:
    budget = Budget(BudgetSettings(calls=1))
    with pytest.raises(ConfigError, match="never fits into 99 tokens per minute"):
        await ask(server, budget, tokens_per_minute=99)
    assert await ask(server, budget) == "hi"
