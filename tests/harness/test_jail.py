"""A harness in the sandbox: it reaches the gateway and nothing else."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from afm.datasets import Task
from afm.harness.episode import HarnessEpisode, HarnessRunner
from afm.harness.program import NO_VERDICT
from afm.harness.sessions import Session
from afm.harness.settings import HarnessSettings
from afm.models.base import ScriptedModel

pytestmark = [pytest.mark.sandbox, pytest.mark.slow]

CLIENT = """
import json, os, socket, sys, urllib.request
task = json.load(sys.stdin)
assert task == json.load(open(os.environ["AFM_TASK"]))
def ask(prompt):
    url = os.environ["OPENAI_BASE_URL"] + "/completions"
    body = json.dumps({"model": os.environ["AFM_MODEL"], "prompt": prompt, "max_tokens": 4}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as reply:
        return json.load(reply)["choices"][0]["text"]
"""


async def play(tmp_path: Path, program: str, **settings: Any) -> HarnessEpisode:
    file = tmp_path / "agent.py"
    file.write_text(CLIENT + textwrap.dedent(program))
    changes = {"timeout_s": 60, "retries": 0, "sandbox": True} | settings
    runner = HarnessRunner(HarnessSettings(command=("python", str(file)), **changes))
    model = ScriptedModel(lambda text: "abcd")

    def open_session(key: str, seed: int) -> Session:
        return Session(key, model, None, seed=seed)

    try:
        task = Task(id="q", question="12+13?", data_source="mini_math", ground_truth="secret")
        return await runner.play(task, [], open_session, 1)
    finally:
        await runner.close()


async def test_a_program_in_the_jail_asks_the_model_and_sees_nothing_of_the_host(tmp_path: Path) -> None:
    """Its own text is shown to it, its neighbours are not; no network but its own loopback; its verdict gets out."""
    (tmp_path / "answers.txt").write_text("secret")
    episode = await play(
        tmp_path,
        f"""
        text = ask(task["question"])
        def refused(*address):
            try:
                socket.create_connection(address, 3).close()
            except OSError:
                return True
        seen = [
            text,
            os.path.exists({str(tmp_path / "answers.txt")!r}),
            refused("127.0.0.1", 22) and refused("1.1.1.1", 53),
            os.getuid() == 0,
            "secret" in open(os.environ["AFM_TASK"]).read(),
        ]
        json.dump({{"answer": json.dumps(seen), "score": 0.5}}, open(os.environ["AFM_VERDICT"], "w"))
        """,
    )
    assert episode.failure == ""
    assert episode.answer == '["abcd", false, true, false, false]'
    assert episode.verdict.score == 0.5
    assert [trajectory.response_mask for trajectory in episode.trajectories] == [(1, 1, 1, 1)]


@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("ask('q'); import time; time.sleep(60)", "timeout"),
        ("ask('q'); raise SystemExit('lost')", "crashed"),
        ("ask('q')\nwhile True: print('x' * 9999)", "output"),
    ],
)
async def test_a_program_that_fails_in_the_jail_is_no_episode(tmp_path: Path, program: str, end: str) -> None:
    seconds = 5.0 if end == "timeout" else 60.0
    episode = await play(tmp_path, program, timeout_s=seconds, max_output_bytes=1 << 16)
    assert dict(episode.ends) == {end: 1}
    assert episode.failure


async def test_a_long_folder_of_temporary_files_and_a_folder_as_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway's socket is below TMPDIR; the kernel's limit for its path is 107 bytes."""
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    for parent in (folder, *folder.parents[:-1]):
        parent.chmod(parent.stat().st_mode | 0o011)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    episode = await play(tmp_path, "ask('q'); os.mkdir(os.environ['AFM_VERDICT'])")
    assert episode.failure == NO_VERDICT
    assert episode.turns == [1]
