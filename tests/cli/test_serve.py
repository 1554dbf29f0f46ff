import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from afm.cli import serve

mcp = pytest.importorskip(
    "mcp"
)  # here: it keeps the standard error that it is imported with, which a test may replace
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-P", "-m", "afm.cli.main", "serve"]


@contextmanager
def serving(*words: str, cwd: Path | None = None) -> Iterator[str]:
    """The address of a server, which must end well."""
    unset = ("CODE_SERVER_TOKEN", "WEB_SERVER_TOKEN", "MCP_SERVER_TOKEN", "SERVER_HOST")
    env = os.environ | dict.fromkeys(unset, "")
    with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True, env=env, cwd=cwd) as process:
        assert process.stdout is not None
        printed = process.stdout.readline()
        try:
            assert printed.startswith("listening on "), printed
            yield printed.split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.sandbox
def test_the_code_server_serves_and_ends_well() -> None:
    with serving("code", "--port", "0") as url:
        answer = httpx.post(f"{url}/run", json={"code": "print(6 * 7)"}, trust_env=False, timeout=60)
        assert answer.json()["stdout"] == "42\n"


BECOMES = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores Ctrl-C
from afm.cli import serve
execv = os.execv
os.execv = lambda *words: (os.kill(os.getpid(), signal.SIGINT), execv(*words))
serve._become("tool_servers code", {"--port": 0})
"""
"""Ctrl-C arrives while the command is replaced by its server."""


def test_ctrl_c_while_a_server_imports_its_modules_ends_without_a_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", BECOMES], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_every_command_becomes_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[str] = []
    monkeypatch.setattr(serve, "_become", lambda program, options: programs.append(program))
    for name in ("crawl", "search", "visual"):
        assert CliRunner().invoke(serve.app, [name, "--port", "0"]).exit_code == 0
    assert programs == [f"tool_servers {name}" for name in ("crawl_page", "web_search", "visual_inspector")]


@pytest.mark.slow
@pytest.mark.sandbox
async def test_tools_are_offered_to_mcp_clients() -> None:
    program = {"code": "```py\nprint(6 * 7)\n```"}
    python, *words = [*COMMAND, "mcp", "--tools", str(ROOT / "configs/tools/code_executor.yaml")]
    async with mcp.Client(mcp.StdioServerParameters(command=python, args=words)) as client:
        assert (await client.call_tool("code", program)).content[0].text == "42"


@pytest.mark.slow
def test_files_in_the_working_folder_are_not_taken_for_libraries(tmp_path: Path) -> None:
    """Neither by the server nor by the process that reads pages for it."""
    for name in ("uvicorn", "tool_servers", "trafilatura"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken for a library')\n")
    (tmp_path / "mill.html").write_text("<p>The mill was built in 1702.</p>")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{site.server_port}"
        (tmp_path / "crawl.yaml").write_text(f"trusted: ['{place}']\nworkers: 1\n")
        with serving("crawl", "--config", "crawl.yaml", "--port", "0", cwd=tmp_path) as url:
            body = {"urls": f"http://{place}/mill.html", "seconds": 60}
            answer = httpx.post(f"{url}/crawl_page", json=body, trust_env=False, timeout=90).json()
        site.shutdown()
    assert "1702" in answer["pages"][0]["text"]


def test_a_config_that_is_absent_is_wrong_usage() -> None:
    command = [*COMMAND, "code", "--config", "absent.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "absent.yaml" in done.stderr
