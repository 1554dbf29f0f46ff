"""A real MCP server on the loopback."""

import pytest
from tool_server import ToolServer


@pytest.fixture
def mcp_server_url(tmp_path):
    """Starts a server for a tools file and returns its address."""
    running = []

    def start(tools_file, **variables):
        running.append(ToolServer("mcp", tmp_path, "--http", "--tools", tools_file, **variables))
        return running[-1].url

    yield start
    for server in running:
        server.stop()
