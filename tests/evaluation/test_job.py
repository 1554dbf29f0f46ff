import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from afm.trajectory.io import load_records

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.sandbox


@pytest.fixture
def world(tmp_path, solver):
    from afm.datasets import write_tasks

    file = tmp_path / "held out.jsonl"
    write_tasks(solver.tasks(6), file)
    return file


async def test_a_tiny_model_answers_alike_whatever_runs_beside_it(tmp_path, tiny_model, world) -> None:
    from afm.evaluation.config import load_config
    from afm.evaluation.job import run_job

    words = [f"model={tiny_model}", "model.threads=1", f"data={world}", "rounds=2"]
    words += ["limits.max_response_tokens=24", f"tools={ROOT / 'configs/tools/code_executor.yaml'}"]
    rows = {}
    for parallel in (1, 12):
        out = tmp_path / f"out {parallel}"
        more = [f"parallel={parallel}", f"output_dir={out}"]
        config = load_config(ROOT / "configs/tiny/eval/math_world.yaml", words + more)
        metrics = await run_job(config)
        assert (metrics.scored, metrics.rounds, metrics.avg_at_k) == (12, 2, 0.0)
        rows[parallel] = {record.id: record.text for record in load_records(out / "episodes.jsonl")}
        assert load_config(out / "config.yaml") == config
    assert rows[1] == rows[12]
    assert len(set(rows[1].values())) == 12
    manifest = json.loads((tmp_path / "out 12/manifest.json").read_text())
    assert len(manifest["settings"]["model"]["digest"]) == 32
    assert manifest["settings"]["tools"]["tools"][0]["class_name"] == "afm.tools.code.CodeTool"


@pytest.mark.slow
def test_the_commands_evaluate_and_report(afm, tmp_path, tiny_model, world) -> None:
    out = tmp_path / "out"
    words = (f"model={tiny_model}", f"data={world}", f"output_dir={out}", "limit=3")
    done = afm("eval", "configs/tiny/eval/math_world.yaml", *words, "limits.max_response_tokens=24")
    assert "math world: pass@1 0.0 % (95 % interval 0.0 % to 56.1 %)" in done.stdout
    assert "3 of 3 episodes scored" in done.stdout
    assert "math world, episodes: 3 of 3" in done.stderr
    reported = afm("report", out)
    page = Path(reported.stdout.strip())
    assert page == out / "report.html"
    assert f"open {page.as_uri()} in a browser (--open does)\n" in reported.stderr
    assert "The math agent, run out" in page.read_text()


def test_a_dry_run_checks_and_prints_everything_and_runs_nothing(afm, tmp_path, tiny_model, world) -> None:
    config = ROOT / "configs/tiny/eval/math_world.yaml"
    words = ("eval", config, f"data={world}", f"output_dir={tmp_path / 'out'}", "--dry-run")
    done = afm(*words, f"model={tiny_model}", "rounds=3")
    assert "rounds: 3" in done.stdout
    assert "# 6 tasks x 3 rounds" in done.stdout
    assert not (tmp_path / "out").exists()
    assert "no such folder; expected a model's folder" in afm(*words, "model=nowhere", status=2).stderr
    assert "did you mean 'rounds'?" in afm(*words, f"model={tiny_model}", "round=3", status=2).stderr
    assert "nowhere.yaml: no such file" in afm("eval", "nowhere.yaml", status=2).stderr
    assert "no such folder" in afm("report", tmp_path / "nowhere", status=2).stderr


@pytest.mark.slow
def test_the_script_passes_everything_on(tmp_path, tiny_model, world) -> None:
    script = ROOT / "evaluation/code_agent/eval.sh"
    settings = {"BENCHMARK": "amc23", "CONFIGS": "configs/tiny/eval", "MODEL": str(tiny_model)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [script, "--dry-run", f"data={world}", f"output_dir={tmp_path / 'a b'}"],
        env={**os.environ, **settings, "PATH": path},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "name: amc23" in done.stdout
    assert f"# 5 tasks x 2 rounds into {tmp_path / 'a b'}; nothing was run" in done.stdout
    bare = {key: value for key, value in os.environ.items() if key != "MODEL"}
    failed = subprocess.run([script], env=bare, capture_output=True, text=True)
    assert failed.returncode != 0
    assert "MODEL: set it to the folder or address" in failed.stderr
