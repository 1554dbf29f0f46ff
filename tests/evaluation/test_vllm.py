"""vLLM and our own engine give the same greedy episodes, token for token.

vLLM for CPUs needs an environment of its own (docs/evaluation.md): ``AFM_VLLM_PYTHON`` is that environment's Python.
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
from reciting import learn_by_heart

from afm.agents import load_agent, save_agent
from afm.models.tiny import create_tiny_model, train_tokenizer
from afm.trajectory import read_records

PYTHON = os.environ.get("AFM_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.sandbox,
    pytest.mark.skipif(not PYTHON, reason="needs vLLM in an environment of its own, AFM_VLLM_PYTHON"),
]
PAIR = (12, 13)


def recited(first: int, second: int) -> list[tuple[str, bool]]:
    """An episode with a tool call, in pieces; True is the model's."""
    question, total = f"{first}+{second}?", first + second
    return [
        (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", False),
        (
            f"<plan>Run it.</plan><think>{question}</think><code>\n```py\nprint({first}+{second})\n```\n</code>",
            True,
        ),
        (f"\n<observation>\n{total}\n</observation>\n", False),
        (f"<reflection>{total}.</reflection><think>Done.</think><answer>\\boxed{{{total}}}</answer>", True),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, solver: ModuleType) -> Path:
    """A model that recites an episode, its tools, and eight questions, seven of them new to it."""
    folder = tmp_path_factory.mktemp("vllm")
    texts = [recited(*PAIR)]
    model = folder / "model"
    train_tokenizer(["".join(piece for piece, _ in text) for text in texts] * 5, model, vocab_size=320)
    create_tiny_model(model, model, hidden_size=64, layers=2, heads=2, mlp=128)
    learn_by_heart(model, texts)
    (folder / "agent.yaml").write_text(
        yaml.safe_dump({"extends": "math", "prompt": "", "question_format": "{question}"})
    )
    save_agent(load_agent(folder / "agent.yaml"), model / "agent.yaml")
    (folder / "tools.yaml").write_text(yaml.safe_dump(solver.CODE_TOOL))
    questions = [PAIR, *((n, 2 * n) for n in range(3, 10))]
    rows = [
        {"id": f"q{a}_{b}", "question": f"{a}+{b}?", "answer": str(a + b), "data_source": "mini_math"}
        for a, b in questions
    ]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    words = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
    words += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", port]
    words += ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
    log = folder / "vllm.log"
    with log.open("w") as file:
        server = subprocess.Popen(
            words, env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}, stdout=file, stderr=file
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
    assert len(ours) == 8
    assert ours[f"{PAIR[0]}+{PAIR[1]}?"][-1] == 1.0
    assert theirs == ours
