from pathlib import Path

import pytest

from afm.agents import load_agent
from afm.tools import load_tools

ROOT = Path(__file__).parents[2]


@pytest.fixture
def spec():
    return load_agent("math")


@pytest.fixture
async def tools():
    loaded = load_tools(ROOT / "configs" / "tools" / "code_executor.yaml")
    yield loaded
    for tool in loaded.values():
        await tool.close()
