"""The load script in small: all servers under load, and each of them killed and started again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.sandbox
def test_no_server_errs_under_load_and_caches_survive_kills(tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    command = [sys.executable, str(ROOT / "benchmarks/load_servers.py"), "--smoke", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    result = json.loads(out.read_text())
    assert (result["errors"], result["kill_errors"]) == (0, 0)
    assert all(counts["right"] > 0 for counts in result["answers"].values())
    assert all(counts["broken by the kill"] > 0 for counts in result["kill_answers"].values())
    assert result["kill"]["web_search"]["from_cache"] == 100
    assert result["kill"]["crawl_page"]["from_cache"] == 100
    assert set(result["exit_statuses"].values()) == {0}
