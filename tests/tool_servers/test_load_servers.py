"""Short runs of the load scripts: all servers under load, and each killed and restarted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def load(script: str, out: Path) -> dict[str, Any]:
    """Return the result of a short run of a script."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), "--smoke", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return dict(json.loads(out.read_text()))


@pytest.mark.slow
def test_the_servers_of_the_web_err_in_no_short_run(tmp_path: Path) -> None:
    result = load("load_web.py", tmp_path / "load.json")
    assert result["errors"] == 0
    assert result["answers"]["200"] > 20


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.sandbox
def test_no_server_errs_under_load_and_caches_survive_kills(tmp_path: Path) -> None:
    result = load("load_servers.py", tmp_path / "load.json")
    assert (result["errors"], result["kill_errors"]) == (0, 0)
    assert all(counts["right"] > 0 for counts in result["answers"].values())
    assert all(counts["broken by the kill"] > 0 for counts in result["kill_answers"].values())
    assert result["kill"]["web_search"]["from_cache"] == 100
    assert result["kill"]["crawl_page"]["from_cache"] == 100
    assert set(result["exit_statuses"].values()) == {0}
