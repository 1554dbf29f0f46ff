from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


def smoke(name: str, out: Path) -> dict[str, Any]:
    command = [sys.executable, str(FOLDER / name), "--smoke", "--out", str(out)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result = json.loads(out.read_text(encoding="utf-8"))
    assert json.loads(printed) == result
    return dict(result)


def test_parse_benchmark_reports_speed_and_where_it_was_measured(tmp_path: Path) -> None:
    result = smoke("bench_parse.py", tmp_path / "parse.json")
    assert result["megabytes_per_s"]["parse"] > 0
    assert {"cpu", "cores", "commit", "versions"} <= set(result["environment"])
    assert {"median_s", "min_s", "max_s"} == set(result["seconds"]["parse"])


def test_masking_benchmark_checks_before_it_measures(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    result = smoke("bench_masking.py", tmp_path / "masking.json")
    assert result["correctness"]["ours, split"] == {"rows": 40, "dropped": 0, "inexact": 0, "leaking": 0}
    rival = result["correctness"]["marker search"]
    assert rival["dropped"] + rival["inexact"] == 40
    assert result["times_stock"]["stock"] == 1.0


@pytest.mark.sandbox
def test_rewards_benchmark_checks_verdicts_before_it_measures(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    result = smoke("bench_rewards.py", tmp_path / "rewards.json")
    assert result["math"]["pairs_per_s"]["score_many"] > 0
    assert result["code_tests"]["cases"] == 12
    assert {"cpu", "cores", "commit", "versions"} <= set(result["environment"])
