import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from afm.cli.recipes import wiki_server
from afm.errors import ToolError
from afm.tools import load_tools

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "configs/tiny/tools/wiki_rag.yaml"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    corpus = folder / "corpus.jsonl"
    corpus.write_text('{"id": "0", "contents": "\\"Belo Karford\\"\\nThe mayor of Belo Karford is Ba Ka."}\n')
    build = [
        sys.executable,
        "-m",
        "tool_servers.wiki_search.build",
        str(corpus),
        f"--output-dir={folder / 'index'}",
    ]
    subprocess.run(build, check=True, capture_output=True)
    return folder / "index"


def test_tools_made_inside_find_it_and_nothing_is_left_behind(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIKI_RAG_SERVER_URL", "http://127.0.0.1:9/elsewhere")

    async def searched() -> str:
        tool = load_tools(TOOLS)["wiki_search"]
        try:
            return (await tool.call("mayor of Belo Karford")).text
        finally:
            await tool.close()

    with wiki_server(index, tmp_path / "log"):
        address = os.environ["WIKI_RAG_SERVER_URL"]
        assert asyncio.run(searched()) == "[1] Belo Karford\nThe mayor of Belo Karford is Ba Ka."
    assert os.environ["WIKI_RAG_SERVER_URL"] == "http://127.0.0.1:9/elsewhere"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")


def test_a_server_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"did not start; see .*log"), wiki_server(tmp_path, tmp_path / "log"):
        raise AssertionError("must not come here")
    assert "error:" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_it_ends_with_its_job_even_by_kill_minus_nine(index: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from afm.cli.recipes import wiki_server\n"
        "with wiki_server(Path(sys.argv[1]), Path(sys.argv[2])):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(60)\n"
    )
    words = [sys.executable, "-c", script, str(index), str(tmp_path / "log")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "up\n"
        [server] = psutil.Process(job.pid).children()
        job.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
