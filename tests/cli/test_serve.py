"""``afm serve``: the command becomes the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import httpx
import pytest


@pytest.mark.sandbox
def test_the_code_server_serves_and_ends_well() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "afm.cli.main", "serve", "code", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"CODE_SERVER_TOKEN": "", "SERVER_HOST": ""},
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        answer = httpx.post(f"{url}/run", json={"code": "print(6 * 7)"}, trust_env=False)
        assert answer.json()["stdout"] == "42\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_config_that_is_absent_is_wrong_usage() -> None:
    command = [sys.executable, "-m", "afm.cli.main", "serve", "code", "--config", "absent.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "absent.yaml" in done.stderr
