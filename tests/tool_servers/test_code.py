"""The code server over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tool_servers.code import CodeServerSettings

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.sandbox


def until(condition: Any, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "bubblewrap"])
def test_programs_run_and_their_failures_are_results(start: Any, backend: str) -> None:
    server = start(sandbox={"backend": backend})
    good = server.post(code="print(input())", stdin="hi\n")
    assert (good.status_code, good.json()["stdout"], good.json()["reason"]) == (200, "hi\n", "ok")
    bad = server.post(code="raise SystemExit(3)").json()
    assert (bad["exit_status"], bad["reason"]) == (3, "error")
    assert (
        server.post(code="import time; time.sleep(60)", limits={"wall_s": 0.5}).json()["reason"] == "timeout"
    )
    assert server.metric('afm_code_runs_total{reason="ok"}') == 1
    assert server.metric('afm_code_runs_total{reason="timeout"}') == 1
    assert server.metric("afm_code_request_seconds_count") == 3
    assert server.metric("afm_code_running") == 0


KEY = {"Authorization": "Bearer a-long-random-token"}


def raw(server: Any, content: Any) -> httpx.Response:
    """Post a raw body."""
    headers = KEY | {"Content-Type": "application/json"}
    return httpx.post(f"{server.url}/run", content=content, headers=headers, timeout=60)


WRONG: list[tuple[bytes, str]] = [
    (b"{", "Invalid JSON"),
    (b"{}", "code: missing, but required"),
    (b'{"code": "1", "cod": "1"}', "cod: unknown key"),
    (b'{"code": "1", "limits": {"wal_s": 1}}', "wal_s: unknown key; did you mean 'wall_s'"),
    (b'{"code": "1", "limits": {"cpu_s": 1.5}}', "cpu_s: got 1.5 (number), expected a whole number"),
    *(
        (b'{"code": "1", "limits": {"wall_s": %b}}' % value, "wall_s")  # not a valid duration
        for value in (b"NaN", b"Infinity", b"1e999", b"-1", b"1" + b"0" * 400)
    ),
]


@pytest.mark.slow
def test_wrong_requests_are_explained(start: Any) -> None:
    server = start()
    for body, message in WRONG:
        refused = raw(server, body)
        assert refused.status_code == 400, body
        assert message in refused.json()["error"]
    assert server.post(code="print(1)").json()["stdout"] == "1\n"


@pytest.mark.slow
def test_a_run_that_names_no_limits_keeps_to_the_servers(start: Any) -> None:
    server = start(max_limits={"wall_s": 5, "output_bytes": 100})
    assert server.post(code="print(1)").json()["reason"] == "ok"
    slow = server.post(code="import time; time.sleep(60)")
    assert (slow.status_code, slow.json()["reason"]) == (200, "timeout")
    long = server.post(code="print('x' * 200)", limits={"wall_s": 4})
    assert (long.status_code, long.json()["reason"]) == (200, "output")
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    assert server.post(code="1", limits={"wall_s": 6}).status_code == 422


@pytest.fixture
def needed() -> Iterator[Path]:
    """A file that the sandbox's user can read."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    (folder / "needed").touch(0o644)
    yield folder / "needed"
    shutil.rmtree(folder)


@pytest.mark.slow
def test_a_broken_sandbox_shows_and_its_recovery_too(start: Any, needed: Path) -> None:
    server = start(sandbox={"backend": "bubblewrap", "binds": [str(needed)]})
    needed.unlink()
    failed = server.post(code="print(1)")
    assert failed.status_code == 503
    assert "needed" in failed.json()["error"]
    for given, detailed in ((None, False), (KEY, True)):
        health = httpx.get(f"{server.url}/health", headers=given, timeout=60)
        assert (health.status_code, health.json()["status"]) == (503, "failing")
        assert ("error" in health.json()) is detailed
    assert server.metric('afm_code_requests_total{outcome="sandbox"}') == 1
    needed.touch(0o644)
    assert server.post(code="print(1)").status_code == 200
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200


def test_requests_are_bounded(start: Any) -> None:
    server = start(max_parallel=1, max_request_bytes=4096, max_limits={"wall_s": 10})
    assert server.post(code="#" * 5000).status_code == 413
    assert raw(server, (b"x" * 1000 for _ in range(9))).status_code == 413
    assert server.post(code="1", stdin="0123456789", limits={"stdin_bytes": 5}).status_code == 413
    beyond = server.post(code="1", limits={"wall_s": 11})
    assert beyond.status_code == 422
    assert "limits.wall_s: got 11, this server allows at most 10" in beyond.json()["error"]


@pytest.mark.slow
def test_requests_that_wait_may_not_fill_the_memory(start: Any, needed: Path) -> None:
    sandbox = {"backend": "bubblewrap", "binds": [str(needed.parent)]}
    server = start(max_parallel=1, max_request_bytes=50_000, max_held_bytes=70_000, sandbox=sandbox)
    program = f"import os, time\nwhile os.path.exists({str(needed)!r}): time.sleep(0.05)\n"
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(server.post, code=program + "#" * 40_000, limits={"wall_s": 120})
        assert until(lambda: server.metric("afm_code_running") == 1)
        refused = server.post(code="#" * 40_000)
        assert (refused.status_code, "bytes of requests are held" in refused.text) == (429, True)
        needed.unlink()
        assert large.result().status_code == 200
    assert server.post(code="print(1)" + "#" * 40_000).status_code == 200


@pytest.mark.slow
def test_the_run_of_a_client_that_left_is_killed(start_process: Any) -> None:
    server = start_process(max_parallel=1)
    body = {"code": "import time; time.sleep(100)", "limits": {"wall_s": 120}}

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            asking = asyncio.create_task(client.post(f"{server.url}/run", json=body, headers=KEY))
            assert await asyncio.to_thread(until, lambda: server.metric("afm_code_running") == 1)
            assert psutil.Process(server.process.pid).children()
            asking.cancel()

    asyncio.run(leave())
    assert until(lambda: server.metric("afm_code_running") == 0)
    assert server.metric('afm_code_requests_total{outcome="gone"}') == 1
    assert server.post(code="print(2)").json()["stdout"] == "2\n"


@pytest.mark.slow
def test_sigterm_lets_programs_finish(start_process: Any) -> None:
    server = start_process(max_parallel=1, finish_s=60)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, code="import time; time.sleep(1); print('done')")
        assert until(lambda: server.metric("afm_code_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        assert running.result().json()["stdout"] == "done\n"
    assert server.process.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        server.post(code="print(1)")


@pytest.mark.slow
def test_sigterm_does_not_wait_for_ever(start_process: Any) -> None:
    server = start_process(max_parallel=1, finish_s=1)

    def ask() -> None:
        with contextlib.suppress(httpx.TransportError):
            server.post(code="import time; time.sleep(100)", limits={"wall_s": 120})

    client = threading.Thread(target=ask)
    client.start()
    assert until(lambda: server.metric("afm_code_running") == 1)
    jails = psutil.Process(server.process.pid).children()
    assert server.end() == 0  # well before the program ends by itself
    client.join()
    assert jails
    assert until(lambda: not any(jail.is_running() for jail in jails))


def test_the_shipped_settings_are_read() -> None:
    bounded = CodeServerSettings.model_validate({"max_limits": {"wall_s": 1}}).max_limits
    assert (bounded.wall_s, bounded.cpu_s) == (1, 180)
    assert CodeServerSettings.read(ROOT / "configs/servers/code.yaml").max_limits.memory_bytes == 8 << 30
