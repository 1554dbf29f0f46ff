import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"

RL = pytest.mark.skipif(
    not os.environ.get("AFM_RL_BENCHMARKS"), reason="takes minutes; set AFM_RL_BENCHMARKS=1 to run it"
)


Smoke = Callable[..., dict[str, Any]]


@pytest.fixture
def smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Smoke:
    """Run benchmarks in this process, because their imports take longer than their work."""

    def run(name: str, *options: str) -> dict[str, Any]:
        out = tmp_path / "result.json"
        monkeypatch.setattr(sys, "argv", [name, "--smoke", "--out", str(out), *options])
        import_module(name).main()
        result = json.loads(out.read_text(encoding="utf-8"))
        assert json.loads(capsys.readouterr().out) == result
        return dict(result)

    return run


@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("command", "package", "figure"),
    [
        ("bench_help", "typer", "processor/afm --help/median_s"),
        ("bench_parse", "afm", "megabytes_per_s/parse"),
        ("bench_eval", "transformers", "overhead/processor/seconds/afm eval/median_s"),
        ("bench_rewards", "math_verify", "math/pairs_per_s/score_many"),
        ("bench_engine --threads 1", "transformers", "models/quickstart/batch/8/tokens_per_s/ours"),
    ],
)
def test_a_benchmark_measures_and_says_where(smoke: Smoke, command: str, package: str, figure: str) -> None:
    pytest.importorskip(package)
    result = smoke(*command.split())
    assert reduce(getitem, figure.split("/"), result) > 0
    assert {"cpu", "cores", "commit", "versions"} <= set(result["environment"])


@pytest.mark.slow
def test_masking_benchmark_checks_before_it_measures(smoke: Smoke) -> None:
    pytest.importorskip("transformers")
    result = smoke("bench_masking")
    assert result["correctness"]["ours, split"] == {"rows": 40, "dropped": 0, "inexact": 0, "leaking": 0}
    rival = result["correctness"]["marker search"]
    assert rival["dropped"] + rival["inexact"] == 40
    assert result["times_stock"]["stock"] == 1.0


@pytest.mark.slow
def test_gateway_benchmark_checks_every_trajectory_and_compares_with_a_direct_connection(
    smoke: Smoke,
) -> None:
    pytest.importorskip("uvicorn")
    results = smoke("bench_gateway")["results"]
    assert (results["held"]["sessions"], results["held"]["requests"], results["held"]["wrong"]) == (20, 60, 0)
    assert {"direct", "recording", "sessions", "held"} == results.keys()
    for name in ("recording", "sessions"):
        assert results[name]["rate_of_direct"] > 0
        assert results[name]["first_ms"] > 0


@pytest.mark.proof
def test_no_trajectory_of_a_program_is_lost_or_mixed_up_when_programs_engine_and_gateway_are_killed(
    tmp_path: Path,
) -> None:
    words = [str(FOLDER / "kill_harness.py"), "--smoke", "--out", str(tmp_path / "result.json")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text("utf-8"))
    assert not any(result["wrong"].values())
    assert result["disturbance"]["programs_killed"] == 4


@pytest.mark.slow
def test_duplicates_benchmark_finds_what_it_planted(smoke: Smoke) -> None:
    pytest.importorskip("datasketch")
    found = smoke("bench_duplicates")["found"]
    assert found["threshold 0.8, similarity 0.79"]["ours"] == 0
    assert found["threshold 0.8, similarity 0.89"]["ours"] == 1


@pytest.mark.slow
@RL
def test_rollout_benchmark_checks_that_every_way_does_the_same(smoke: Smoke) -> None:
    pytest.importorskip("verl")
    result = smoke("bench_rollout")
    assert result["work"]["checked"]
    assert {"ours", "tool_agent", "turn by turn"} == set(result["times_bound"])
    assert result["seconds"]["ours"]["median_s"] >= result["slowest_tools_s"]


@pytest.mark.slow
@RL
def test_step_benchmark_compares_equal_steps(smoke: Smoke) -> None:
    pytest.importorskip("verl")
    result = smoke("bench_step")
    assert (result["work"]["samples"], result["work"]["response_tokens"]) == (64, 16)
    assert result["seconds"]["ours"]["step"]["median_s"] > 0


@pytest.mark.proof
def test_pipeline_benchmark_checks_that_all_keep_the_same_before_it_measures(smoke: Smoke) -> None:
    pytest.importorskip("datasketch")
    result = smoke("bench_pipeline")
    assert result["filter"]["rows"] == 200
    # keeps 3 of 10, 1 of 10 three times, and 3 of the 20 without reflection
    assert result["filter"]["written"] == 123
    assert result["merge"]["written"] == 200
    assert {"ours, 1 process", "ours, 2 processes", "plain"} == set(result["filter"]["times_plain"])


ABLATION = (sys.executable, str(FOLDER / "ablate_data.py"), "--smoke", "--seeds", "0", "--out")


@pytest.mark.proof
def test_ablation_of_data_makes_three_sets_with_and_without_flaws(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    subprocess.run([*ABLATION, str(tmp_path), "--only-sets"], capture_output=True, check=True)

    sets = {
        name: [json.loads(line) for line in (tmp_path / f"sets/{name}/kept.jsonl").open()]
        for name in ("raw", "filtered", "enriched")
    }
    memory = {name: sum(not row["calls"] for row in rows) for name, rows in sets.items()}
    assert len(sets["raw"]) == 120
    assert memory["raw"] > 0 == memory["filtered"] == memory["enriched"]
    assert any("+3" in row["id"] for row in sets["enriched"])
    reasons = json.loads((tmp_path / "sets/filtered/manifest.json").read_text("utf-8"))["dropped"]
    assert set(reasons) == {"complexity", "format", "repetition", "quality"}


@pytest.mark.slow
@RL
def test_ablation_of_data_trains_on_equally_many_rows_and_does_it_once(tmp_path: Path) -> None:
    pytest.importorskip("llamafactory")
    subprocess.run([*ABLATION, str(tmp_path)], capture_output=True, check=True)
    result = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))

    assert [run["set"] for run in result["runs"]] == ["raw", "filtered", "enriched"]
    drawn = [json.loads(file.read_text("utf-8")) for file in tmp_path.glob("*/seed0/data/rows.json")]
    assert [len(rows) for rows in drawn] == [result["rows"]] * 3
    models = [tmp_path / "base/model.safetensors", *tmp_path.glob("*/seed0/sft/model.safetensors")]
    before = [model.stat().st_mtime_ns for model in models]
    again = subprocess.run([*ABLATION, str(tmp_path)], capture_output=True, text=True, check=True).stdout
    assert json.loads(again)["runs"] == result["runs"]
    assert [model.stat().st_mtime_ns for model in models] == before


@pytest.mark.parametrize(
    ("words", "command"),
    [(["--cpu"], "requirements/install-cpu.sh"), ([], "requirements/install-gpu.sh gpu-rl-vllm")],
)
def test_first_contact_without_an_environment_names_the_command_that_makes_it(
    tmp_path: Path, words: list[str], command: str
) -> None:
    absent = os.environ | dict.fromkeys(("SFT_VENV", "RL_VENV"), str(tmp_path))
    done = subprocess.run([str(FOLDER / "gpu_smoke.sh"), *words], env=absent, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path}: no environment there; make it: {command}\n"


@pytest.mark.proof
def test_first_contact_with_a_gpu_is_rehearsed_without_one(tmp_path: Path) -> None:
    """Run every step except ZeRO-3 and vLLM on the CPU; a second call has nothing left to do."""
    venv = Path(sys.prefix)
    environment = os.environ | {"SFT_VENV": str(venv), "RL_VENV": str(venv)}
    words = [str(FOLDER / "gpu_smoke.sh"), "--cpu", "--output-dir", str(tmp_path / "smoke")]
    first, again = (
        subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1800) for _ in range(2)
    )
    assert first.returncode == 0, first.stdout + first.stderr
    table = [line for line in again.stdout.splitlines() if line.startswith("| ") and "| passed |" in line]
    assert len(table) == 9
