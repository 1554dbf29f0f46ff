"""A real MCP server process on the loopback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def mcp_process():
    """Starts a server for a tools file and returns its address; ``program`` may be another that takes the same words."""
    running = []

    def start(tools_file, token="", program=("-m", "tool_servers.mcp")):
        process = subprocess.Popen(
            [sys.executable, *program, "--tools", str(tools_file), "--http", "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"MCP_SERVER_TOKEN": token, "SERVER_HOST": "127.0.0.1"},
        )
        running.append(process)
        assert process.stdout is not None
        return process.stdout.readline().split()[-1]

    yield start
    for process in running:
        process.terminate()
        assert process.wait(20) == 0
        process.stdout.close()
