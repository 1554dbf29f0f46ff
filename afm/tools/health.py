"""Health checks of what tools depend on (servers, the local sandbox), and ``afm doctor`` for a tools file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import httpx

from afm.agents import load_agent, shipped_agents
from afm.configuration import apply_overrides, read_file
from afm.errors import AfmError, SandboxError
from afm.findings import Finding, Level, Report
from afm.terminal import plural
from afm.tools.base import Tool, TrustedTool
from afm.tools.code import CodeTool
from afm.tools.registry import (
    ToolEntry,
    ToolsFile,
    declared_beside,
    default_tools,
    load_tools,
    read_tools_file,
    tools_beside,
)

_PATIENCE_S = 2.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PROGRAM = "```py\nprint(6 * 7)\n```"


@runtime_checkable
class ServedTool(Protocol):
    """A tool that uses servers."""

    @property
    def servers(self) -> tuple[str, ...]:
        """The servers' addresses, without the path of requests."""
        ...


async def tool_troubles(tools: Iterable[Tool]) -> dict[str, str]:
    """Return the fault of each tool that cannot work now, by its name. This searches, reads and inspects nothing.

    Other kinds of tools (MCP, cassettes, your own) are not checked.
    """
    asked = list(tools)
    troubles = await asyncio.gather(*(_trouble(tool) for tool in asked))
    return {tool.name: trouble for tool, trouble in zip(asked, troubles, strict=True) if trouble}


async def unanswered(address: str) -> str | None:
    """Return why no server answers at an address, or ``None`` if one does."""
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
    reasons = await asyncio.gather(*(unanswered(f"{server}/health") for server in servers))
    silent = [f"{server} ({why})" for server, why in zip(servers, reasons, strict=True) if why]
    return f"no server answers at {', '.join(silent)}" if silent else None


async def _sandbox_trouble(tool: CodeTool) -> str | None:
    try:
        result = await tool.call(_PROGRAM)
    except SandboxError as error:
        return str(error)
    finally:
        await tool.close()
    return None if result.ok and result.text == "42" else f"a program did not run: {result.text}"


def diagnose(
    config_path: str | Path, overrides: Sequence[str], env: Mapping[str, str], report: Report | None = None
) -> list[Finding]:
    """Return all findings on a tools file. It raises no error.

    It checks the health of every server and runs one program in a local sandbox. It searches and reads nothing.
    """
    report = report or Report()
    loaded = report.asked("tools", lambda: _loaded(Path(config_path), overrides))
    if loaded is None:
        return report.findings
    tools, file = loaded
    report.add(
        Finding(Level.OK, "keys", f"{plural(len(tools), 'tool')}: {', '.join(sorted(tools)) or 'none'}")
    )
    report.add(*tool_findings(tools, file))
    report.add(*_variables(tools, env))
    report.add(*_served_agents(tools))
    return report.findings


def diagnose_agent(path: Path, overrides: Sequence[str], report: Report) -> list[Finding]:
    """Return all findings on an agent and the tools that it calls. It needs no model."""
    spec = report.asked("agent", lambda: load_agent(path))
    if spec is None:
        return report.findings
    if overrides:
        report.add(Finding(Level.ERROR, "keys", f"{overrides[0]}: an agent takes no overrides; edit {path}"))
    calls = "any number of" if spec.limits.max_turns is None else f"at most {spec.limits.max_turns}"
    text = f"{spec.name} ({spec.digest}), roles {', '.join(spec.roles)}, {calls} tool calls an episode"
    report.add(Finding(Level.OK, "agent", text))
    try:
        own = tools_beside(spec, path) if spec.tool_roles else None
        report.add(*tool_findings(load_tools(own) if own else default_tools(spec)))
    except AfmError as error:
        advice = "declare them in a YAML next to the agent, and name it in the run (docs/tools.md)"
        if beside := [f"{file} declares {', '.join(sorted(names))}" for file, names in declared_beside(path)]:
            advice = f"{'; '.join(beside)}: correct the name there, or `tool` under the agent's `roles`"
        report.add(Finding(Level.WARNING, "tools", f"{error}; {advice}"))
    return report.findings


def tool_findings(tools: Mapping[str, Tool], file: ToolsFile | None = None) -> Iterator[Finding]:
    """Yield a finding per tool: whether its server answers, or its sandbox runs a program.

    Args:
        file: The declarations of the tools, to show the arguments of those that are not called here.
    """
    declared = {entry.tool_schema.function.name: entry for entry in file.tools} if file else {}
    troubles = asyncio.run(tool_troubles(tools.values()))
    for name in sorted(tools):
        if name in troubles:
            yield Finding(Level.WARNING, "tools", f"{name}: {troubles[name]}; {_advice(tools[name])}")
        else:
            yield Finding(Level.OK, "tools", f"{name}: {_place(tools[name], declared.get(name))}")


def _advice(tool: Tool) -> str:
    if not (isinstance(tool, ServedTool) and tool.servers):
        return "see docs/sandbox.md"
    known = tool.name in ("code", "crawl_page", "visual_inspector", "web_search", "wiki_search")
    return f"start it: tool_servers/servers.sh start {tool.name}" if known else "start it (docs/tools.md)"


def loopback_findings(
    tools: Mapping[str, Tool], nodes: int, judges: Iterable[str | None] = ()
) -> Iterator[Finding]:
    """Yield a warning per tool or judge with a loopback address, which is another server on each of several nodes."""
    served = [
        (name, tool.servers, "docs/tools.md")
        for name, tool in sorted(tools.items())
        if isinstance(tool, ServedTool)
    ]
    for name, servers, page in [*served, ("judge", tuple(filter(None, judges)), "docs/judge.md")]:
        local = [server for server in dict.fromkeys(servers) if httpx.URL(server).host in _LOOPBACK]
        if local and nodes > 1:
            text = f"{name}: {', '.join(local)} is another server on each of the {nodes} nodes"
            advice = f"set an address that all nodes reach ({page}), or start a server on every node"
            yield Finding(Level.WARNING, "addresses", f"{text}; {advice}")


def _loaded(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Tool], ToolsFile]:
    if not overrides:
        return load_tools(path), read_tools_file(path)
    data = read_file(path, "tools")
    apply_overrides(data, overrides)
    return load_tools(data), read_tools_file(data)


def _type_of(schema: object) -> str:
    return str(schema.get("type", "any")) if isinstance(schema, dict) else "any"


def _place(tool: Tool, entry: ToolEntry | None) -> str:
    servers = getattr(tool, "servers", None)
    if servers is None:
        class_name, takes = f"{type(tool).__module__}.{type(tool).__qualname__}", ""
        if entry:
            class_name, schemas = (
                entry.class_name,
                entry.tool_schema.function.parameters.get("properties", {}),
            )
            arguments = ", ".join(f"{key} ({_type_of(schema)})" for key, schema in schemas.items())
            takes = f", it takes {arguments or 'any text'}"
        text = f"{class_name} can be imported, its settings are valid{takes}"
        return f"{text}; it was not called, so its answers are not checked"
    return f"answers at {', '.join(servers)}" if servers else "runs programs on this machine"


def _variables(tools: Mapping[str, Tool], env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding per tool that needs environment variables which are not set."""
    for name, tool in sorted(tools.items()):
        unset = [key for key in tool.variables() if not env.get(key)] if isinstance(tool, TrustedTool) else []
        if unset:
            text = f"{name}: {', '.join(unset)} not set; export it before you start the run"
            yield Finding(Level.WARNING, "environment", text)


def _served_agents(tools: Mapping[str, Tool]) -> Iterator[Finding]:
    fit, lacking = [], []
    for agent in shipped_agents():
        missing = sorted(set(load_agent(agent).tool_roles.values()) - set(tools))
        if missing:
            lacking.append(f"{agent} lacks {', '.join(missing)}")
        else:
            fit.append(agent)
    if fit:  # tools of one's own serve no shipped agent
        served = f"shipped agents with all their tools here: {', '.join(fit)}"
        yield Finding(Level.OK, "agents", "; ".join([served, *lacking]))
