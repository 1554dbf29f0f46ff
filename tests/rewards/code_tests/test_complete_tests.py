"""LiveCodeBench's own files instead of the sample tests of a row, and many verdicts at once."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path

import pytest
from answered import answered

from afm.rewards import Sample, load_reward, score_many

pytestmark = pytest.mark.sandbox

SAMPLES = {"stdin": ["1\n"], "expected_output": ["1\n"], "question_id": "abc1"}
SQUARE, COPY = "print(int(input()) ** 2)", "print(input())"


def sample(program: str, truth: object) -> Sample:
    return answered("code", "lcbv5", program, truth)


def file_of_livecodebench(folder: Path) -> Path:
    private = json.dumps([{"input": "5\n", "output": "25\n", "testtype": "stdin"}])
    row = {
        "question_id": "abc1",
        "public_test_cases": json.dumps([{"input": "1\n", "output": "1\n", "testtype": "stdin"}]),
        "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(private))).decode(),
        "metadata": "{}",
    }
    (folder / "test.jsonl").write_text(json.dumps(row) + "\n")
    return folder


@pytest.mark.parametrize("by_environment", [False, True])
async def test_the_complete_tests_count_where_they_are_given(
    by_environment: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples_only, folder = load_reward(), str(file_of_livecodebench(tmp_path))
    assert (await samples_only.score(sample(COPY, SAMPLES))).score == 1.0
    if by_environment:
        monkeypatch.setenv("LIVECODEBENCH_DATA_PATH", folder)
    complete = load_reward({} if by_environment else {"code_tests": {"livecodebench": folder}})
    assert (await complete.score(sample(COPY, SAMPLES))).score == 0.0
    verdict = await complete.score(sample(SQUARE, SAMPLES))
    assert (verdict.score, verdict.evidence) == (1.0, "2/2 cases pass")
    unknown = await complete.score(sample(SQUARE, {**SAMPLES, "question_id": "abc2"}))
    assert (unknown.score, unknown.evidence) == (1.0, "1/1 cases pass")  # the samples, for want of more
    for reward in (samples_only, complete):
        await reward.close()


@pytest.mark.slow
async def test_many_programs_at_once_get_their_own_verdicts() -> None:
    """Right, wrong, crashing and hanging programs do not disturb each other."""
    # Beside other tests, a program of 0.5 s is starved before it has computed that long, and abstains.
    reward = load_reward({"code_tests": {"case_s": 2.0}})
    cases = {"stdin": [f"{n}\n" for n in range(12)], "expected_output": [f"{n * n}\n" for n in range(12)]}
    asserts = {"test_list": [f"assert f({n}) == {n * n}" for n in range(12)]}
    kinds = [
        (sample(SQUARE, cases), 1.0),
        (sample(COPY, cases), 0.0),
        (sample("import os\nos.kill(os.getppid(), 9)", cases), 0.0),
        (sample("def f(n): return n * n", asserts), 1.0),
        (sample("def f(n): return n", asserts), 0.0),
        (sample("import os\nwhile True:\n    os.fork()", cases), 0.0),
        (sample("while True: pass", cases), 0.0),
    ]
    everything = (kinds[:6] * 4) + kinds[6:]
    verdicts = await score_many(reward, [given for given, _ in everything])
    await reward.close()
    assert [verdict.score for verdict in verdicts] == [expected for _, expected in everything]
