"""`train/*/all.sh` runs SFT in .venv-sft, RL and the evaluation's server in .venv-rl: stand-ins record who is called."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

STAND_IN = """#!/bin/bash
set -e
environment=$(cd "$(dirname "$0")/.." && pwd)
echo "$(basename "$environment") $(basename "$0") $*" >>"$STAND_IN_LOG"
for word in "$@"; do case $word in output_dir=*) out=${word#output_dir=} ;; esac; done
case $1 in
reproduce) exec "$environment/bin/python" -m afm.cli.main "$@" ;;
sft) mkdir -p "$out"; touch "$out/config.json" ;;
rl) mkdir -p "$out/model"; touch "$out/model/config.json" ;;
serve) echo "ready: afm eval CONFIG model=http://127.0.0.1:1 model.name=m model.tokenizer=t"; exec sleep 60 ;;
eval) mkdir -p "$out"; touch "$out/metrics.json" ;;
report) touch "$2/report.html" ;;
*doctor* | -P) echo '{"findings": []}' ;;
esac
"""
MADE_BEFORE = ("raw/download.lock.json", "sft/dataset_info.json", "rl/train.parquet", "rl/val.parquet")
MADE_BEFORE += ("eval/nq.jsonl", "raw/prompts/mhqa_agent.txt")


CHECKED = {"sft": "sft/mhqa_agent_qwen2.5_3b.yaml", "rl": "rl/mhqa_ppo_3b.yaml", "eval": "eval/nq.yaml"}


def program(path: Path, text: str = STAND_IN) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A GPU machine's checkout: prepared data, a base environment, and one for each engine."""
    folder = tmp_path / "check out"
    folder.mkdir()
    for name in ("train", "evaluation", "configs", "environment.sh", "requirements"):
        (folder / name).symlink_to(ROOT / name)
    for name in MADE_BEFORE:
        path = folder / "data/mhqa_agent" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for name in (".venv-sft/bin/python", ".venv-sft/bin/afm", ".venv-rl/bin/python", ".venv-rl/bin/afm"):
        program(folder / name)
    program(folder / ".venv/bin/afm")
    (folder / ".venv/bin/python").symlink_to(os.path.realpath(sys.executable))
    program(tmp_path / "driver/nvidia-smi", "#!/bin/sh\n")
    return folder


def test_each_stage_runs_in_its_own_environment(checkout: Path, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    env = {
        "PATH": f"{tmp_path}/driver:/usr/bin:/bin",
        "PYTHONPATH": f"{ROOT}:{sysconfig.get_path('purelib')}",
        "HOME": str(tmp_path),
        "STAND_IN_LOG": str(log),
        "SIZE": "3b",
        "BENCHMARKS": "nq",
        "FROM": "sft",
    }
    words = [str(checkout / "train/mhqa_agent/all.sh")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    calls = [line.split() for line in log.read_text(encoding="utf-8").splitlines()]
    checks = [
        (call[0], next(name for name, recipe in CHECKED.items() if f"configs/{recipe}" in " ".join(call)))
        for call in calls
        if "doctor" in call
    ]
    assert checks == [(".venv-sft", "sft"), (".venv-rl", "rl"), (".venv-rl", "eval")]
    runs = [tuple(call[:3]) for call in calls if call[1] == "afm"]
    assert runs == [
        (".venv", "afm", "reproduce"),
        (".venv-sft", "afm", "sft"),
        (".venv-rl", "afm", "rl"),
        (".venv-rl", "afm", "serve"),
        (".venv-rl", "afm", "eval"),
        (".venv", "afm", "report"),
    ]


def test_a_script_without_an_environment_names_the_command_that_makes_one(
    checkout: Path, tmp_path: Path
) -> None:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "MODEL": "m"}
    for name in (".venv", ".venv-rl", ".venv-sft"):
        shutil.rmtree(checkout / name)
    for script in ("train/mhqa_agent/all.sh", "evaluation/web_agent/eval.sh"):
        done = subprocess.run([str(checkout / script)], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert f"error: afm is not installed: expected it on the PATH or in {checkout} (" in done.stderr
        assert "on a GPU machine requirements/install-gpu.sh gpu-rl-vllm" in done.stderr
