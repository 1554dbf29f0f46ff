"""An MCP server on the loopback."""

import pytest
from tool_server import ToolServer, running


@pytest.fixture
def mcp_server_url(tmp_path):
    """Starts a server for a tools file and returns its address."""
    with running(ToolServer, tmp_path) as start:
        yield lambda tools, **variables: start("mcp", "--http", "--tools", tools, **variables).url
