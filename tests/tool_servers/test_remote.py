"""The code tool with several code servers: load balancing, failover, waiting and giving up."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tool_entries import opened

from afm.errors import ConfigError, DataError, SandboxError
from afm.rewards import load_reward
from afm.rewards.attack_suite import outcomes, shipped_attacks
from afm.sandbox import ExitReason, SandboxLimits
from afm.tools.remote import RemoteSandbox

CODE = "code.CodeTool"
TOKEN = "a-long-random-token"
pytestmark = pytest.mark.sandbox


@contextlib.asynccontextmanager
async def listening(connected: Any) -> AsyncIterator[str]:
    """Run a server with this connection handler; yield its address."""
    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
async def remote() -> AsyncIterator[Any]:
    """Open sandboxes of these servers, and close them at the end."""
    sandboxes = []

    def of(*servers: Any, token: str = TOKEN, **options: Any) -> RemoteSandbox:
        urls = [server if isinstance(server, str) else server.url for server in servers]
        sandboxes.append(RemoteSandbox(urls, token=token, **options))
        return sandboxes[-1]

    yield of
    for sandbox in sandboxes:
        await sandbox.close()


def ok_runs(server: Any) -> float:
    return server.metric('afm_code_runs_total{reason="ok"}')


@pytest.mark.slow
async def test_a_remote_run_is_like_a_local_one(start: Any, remote: Any) -> None:
    sandbox = remote(start())
    result = await sandbox.run("print(input())\nraise SystemExit(3)", "a\ud800\u00e9\n")
    assert (result.stdout, result.exit_status, result.reason) == ("a?\u00e9\n", 3, ExitReason.ERROR)
    slow = await sandbox.run("while True: pass", "", SandboxLimits(wall_s=0.5))
    assert (slow.reason, slow.exit_status) == (ExitReason.TIMEOUT, None)
    with pytest.raises(DataError, match="stdin is 11 bytes long, expected at most 5"):
        await sandbox.run("1", "0123456789\n", SandboxLimits(stdin_bytes=5))


@pytest.mark.slow
async def test_the_tool_spreads_its_programs(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODE_SERVER_TOKEN", TOKEN)
    servers = [start(max_parallel=1), start(max_parallel=1)]
    tool = opened(CODE, "code", urls=[server.url for server in servers])
    results = await asyncio.gather(*(tool.call(f"```py\nprint({n} * 2)\n```") for n in range(10)))
    assert [result.text for result in results] == [str(n * 2) for n in range(10)]
    assert [ok_runs(server) for server in servers] == [5, 5]
    await tool.close()


@pytest.mark.slow
async def test_a_server_that_dies_in_the_middle_loses_nothing(
    start: Any, start_process: Any, remote: Any
) -> None:
    dying = start_process(max_parallel=2)
    sandbox = remote(dying, start(max_parallel=2))
    runs = [asyncio.create_task(sandbox.run(f"import time; time.sleep(0.4); print({n})")) for n in range(12)]
    await asyncio.sleep(0.7)
    assert await asyncio.to_thread(dying.end, signal.SIGKILL) == -signal.SIGKILL
    assert [result.stdout for result in await asyncio.gather(*runs)] == [f"{n}\n" for n in range(12)]
    assert (await sandbox.run("print(1)")).stdout == "1\n"


@pytest.mark.slow
async def test_a_server_that_failed_is_left_in_peace_for_a_while(start: Any, remote: Any) -> None:
    visits = 0

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal visits
        visits += 1
        writer.close()

    async with listening(hang_up) as broken:
        sandbox = remote(broken, start())
        assert [(await sandbox.run("print(1)")).stdout for _ in range(4)] == ["1\n"] * 4
    assert visits == 1


@pytest.mark.slow
async def test_when_all_are_down_it_is_no_fault_of_the_program(remote: Any) -> None:
    urls = ["http://127.0.0.1:1", "http://127.0.0.1:9"]
    with pytest.raises(SandboxError, match="no code server could run the program") as caught:
        await remote(*urls, rounds=2).run("print(1)")
    assert all(f"{url}: ConnectError" in str(caught.value) for url in urls)
    tool = opened(CODE, "code", urls=urls)
    result = await tool.call("```py\nprint(1)\n```")
    assert (result.ok, result.meta["reason"]) == (False, "sandbox")
    await tool.close()


@pytest.mark.slow
async def test_a_full_server_is_waited_for(start: Any, remote: Any) -> None:
    server = start(max_parallel=1, max_waiting=0)
    sandbox = remote(server, rounds=1)
    results = await asyncio.gather(*(sandbox.run("import time; time.sleep(0.3)") for _ in range(3)))
    assert [result.reason for result in results] == [ExitReason.OK] * 3
    assert server.metric('afm_code_requests_total{outcome="busy"}') >= 2
    blocker = asyncio.create_task(sandbox.run("import time; time.sleep(100)", "", SandboxLimits(wall_s=120)))
    assert await comes_to(server, running=1)
    with pytest.raises(SandboxError, match="busy: 1 running, 0 waiting"):
        await remote(server, busy_s=0.2).run("print(1)")
    blocker.cancel()


async def test_a_wrong_token_is_not_tried_again(start: Any, remote: Any) -> None:
    server = start()
    with pytest.raises(SandboxError, match="refused the token; set CODE_SERVER_TOKEN") as caught:
        await remote(server, token="other", rounds=9).run("print(1)")
    assert "other" not in str(caught.value)
    assert server.metric('afm_code_requests_total{outcome="token"}') == 1
    with pytest.raises(SandboxError, match="got 999, this server allows at most 180"):
        await remote(server).run("1", "", SandboxLimits(wall_s=999))


@pytest.mark.slow
async def test_cancelling_kills_the_program_over_there(start: Any, remote: Any) -> None:
    server = start(max_parallel=1)
    program = remote(server).run("import time; time.sleep(100)", "", SandboxLimits(wall_s=120))
    run = asyncio.create_task(program)
    assert await comes_to(server, running=1)
    run.cancel()
    await asyncio.wait([run])
    assert await comes_to(server, running=0)


async def comes_to(server: Any, *, running: int) -> bool:
    for _ in range(1200):
        if server.metric("afm_code_running") == running:
            return True
        await asyncio.sleep(0.05)
    return False


async def test_strange_answers_are_failures_of_the_server(remote: Any) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"stdout": 3 }')
        await writer.drain()
        writer.close()

    async with listening(speak) as odd:
        with pytest.raises(SandboxError, match="its answer is not the result of a run: stdout: "):
            await remote(odd).run("print(1)")


@pytest.mark.slow
async def test_rewards_may_run_their_programs_there(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODE_SERVER_TOKEN", TOKEN)
    server = start()
    reward = load_reward({"code_tests": {"urls": [server.url]}})
    wanted = ("honest program", "wrong program", "asserts honestly passed", "exit before the asserts")
    attacks = [attack for attack in shipped_attacks() if attack.name in wanted]
    found = {outcome.attack.name: outcome.got async for outcome in outcomes(reward, attacks)}
    assert found == dict(zip(wanted, (1.0, 0.0, 1.0, 0.0), strict=True))
    assert ok_runs(server) >= 4
    await reward.close()
    nobody = load_reward({"code_tests": {"urls": ["http://127.0.0.1:9"]}})
    [lost] = [outcome async for outcome in outcomes(nobody, attacks[:1])]
    assert (lost.got, "no code server could run" in lost.evidence) == (None, True)
    await nobody.close()


@pytest.mark.parametrize(
    ("urls", "token", "message"),
    [
        (["ftp://x"], TOKEN, "expected an address such as http://"),
        (["http://u:secret@x"], TOKEN, "holds a password"),
        ([], TOKEN, "empty list"),
        (["http://x:1"], "secret\n", "CODE_SERVER_TOKEN: expected printable ASCII"),
    ],
)
def test_wrong_addresses_and_tokens_are_refused_without_showing_a_secret(
    urls: list[str], token: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        RemoteSandbox(urls, token=token)
    assert "cret" not in str(caught.value)
