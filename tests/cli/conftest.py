import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from afm.agents import AgentSpec, save_agent

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def talker() -> AgentSpec:
    """An agent of 40 tokens without tools."""
    return AgentSpec(
        name="talker",
        roles={"plan": {}, "answer": {"kind": "answer"}},
        transitions={"start": ("plan", "answer"), "plan": ("answer",)},
        limits={"max_response_tokens": 40},
        question_format="Q: {question}",
    )


@pytest.fixture(scope="session")
def talker_folder(tmp_path_factory: pytest.TempPathFactory, talker: AgentSpec) -> Path:
    """A random model that was "trained" as the talker, and can read and write a lot."""
    from afm.models.tiny import create_tiny_model, train_tokenizer

    folder = tmp_path_factory.mktemp("model")
    train_tokenizer(["<answer>4</answer> What is 2 + 2?"] * 50, folder, vocab_size=280)
    create_tiny_model(folder, folder, max_positions=1 << 16)
    save_agent(talker, folder / "agent.yaml")
    return folder


@pytest.fixture
def kill_when() -> Callable[..., None]:
    """Starts a job and ends it by ``kill -9`` once something is reached."""

    def kill(command: list[str], reached: Callable[[], bool], **options: Any) -> None:
        with subprocess.Popen(command, cwd=ROOT, **options) as job:
            deadline = time.monotonic() + 600
            while not reached():
                assert job.poll() is None, f"the job ended with {job.returncode} too early"
                assert time.monotonic() < deadline
                time.sleep(0.05)
            job.send_signal(signal.SIGKILL)

    return kill
