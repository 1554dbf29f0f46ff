"""Whether what tools depend on is there: their servers, or the sandbox of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import httpx

from afm.errors import SandboxError
from afm.tools.base import Tool
from afm.tools.code import CodeTool

_PATIENCE_S = 2.0
_PROGRAM = "```py\nprint(6 * 7)\n```"


@runtime_checkable
class ServedTool(Protocol):
    """A tool that asks servers."""

    @property
    def servers(self) -> tuple[str, ...]:
        """Their addresses, without the path of requests."""
        ...


async def tool_troubles(tools: Iterable[Tool]) -> dict[str, str]:
    """What is wrong with each tool that cannot work now, by its name. Nothing is searched, read or looked at.

    Tools of other kinds (MCP, cassettes, your own) are not asked.
    """
    asked = list(tools)
    told = await asyncio.gather(*(_trouble(tool) for tool in asked))
    return {tool.name: trouble for tool, trouble in zip(asked, told, strict=True) if trouble}


async def unanswered(address: str) -> str | None:
    """Why nobody answers at an address, ``None`` when somebody does, whatever it is."""
    try:
        async with httpx.AsyncClient(timeout=_PATIENCE_S, trust_env=False) as client:
            await client.get(address)
    except httpx.TimeoutException:
        return f"no answer within {_PATIENCE_S:g} s"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"{type(error).__name__}: {error}".rstrip(": ")
    return None


async def _trouble(tool: Tool) -> str | None:
    servers = tool.servers if isinstance(tool, ServedTool) else ()
    if not servers:
        return await _sandbox_trouble(tool) if isinstance(tool, CodeTool) else None
    told = await asyncio.gather(*(unanswered(f"{server}/health") for server in servers))
    silent = [f"{server} ({why})" for server, why in zip(servers, told, strict=True) if why]
    return f"no server answers at {', '.join(silent)}" if silent else None


async def _sandbox_trouble(tool: CodeTool) -> str | None:
    try:
        result = await tool.call(_PROGRAM)
    except SandboxError as error:
        return str(error)
    finally:
        await tool.close()
    return None if result.ok and result.text == "42" else f"a program did not run: {result.text}"
