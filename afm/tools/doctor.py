"""What would go wrong with tools, told before a run needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from afm.agents import load_agent, shipped_agents
from afm.configuration import apply_overrides, read_file
from afm.planning import Finding, Level, Report
from afm.tools.base import Tool, TrustedTool
from afm.tools.health import tool_troubles
from afm.tools.registry import load_tools


def diagnose(config_path: str | Path, overrides: Sequence[str], env: Mapping[str, str]) -> list[Finding]:
    """Everything that can be said about a tools file; no error is raised.

    Every server is asked for its health, and a local sandbox runs one program. Nothing is searched or read.
    """
    report = Report()
    tools = report.asked("tools", lambda: _loaded(Path(config_path), overrides))
    if tools is None:
        return report.findings
    report.add(Finding(Level.OK, "keys", f"{len(tools)} tools: {', '.join(sorted(tools)) or 'none'}"))
    report.add(*tool_findings(tools))
    report.add(*_variables(tools, env))
    report.add(_served_agents(tools))
    return report.findings


def tool_findings(tools: Mapping[str, Tool]) -> Iterator[Finding]:
    """For each tool whether its server answers here, or its sandbox runs a program."""
    troubles = asyncio.run(tool_troubles(tools.values()))
    for name in sorted(tools):
        if name in troubles:
            text = f"{name}: {troubles[name]}; start it before the run (docs/tools.md), where every node reaches it"
            yield Finding(Level.WARNING, "tools", text)
        else:
            yield Finding(Level.OK, "tools", f"{name}: {_place(tools[name])}")


def _loaded(path: Path, overrides: Sequence[str]) -> dict[str, Tool]:
    if not overrides:
        return load_tools(path)
    data = read_file(path, "tools")
    apply_overrides(data, overrides)
    return load_tools(data)


def _place(tool: Tool) -> str:
    servers = getattr(tool, "servers", None)
    if servers is None:
        return "declared, not asked"
    return f"answers at {', '.join(servers)}" if servers else "runs programs on this machine"


def _variables(tools: Mapping[str, Tool], env: Mapping[str, str]) -> Iterator[Finding]:
    """Variables of the environment that a tool hands on."""
    for name, tool in sorted(tools.items()):
        unset = [key for key in tool.variables() if not env.get(key)] if isinstance(tool, TrustedTool) else []
        if unset:
            text = f"{name}: {', '.join(unset)} not set; export it where the run starts"
            yield Finding(Level.WARNING, "environment", text)


def _served_agents(tools: Mapping[str, Tool]) -> Finding:
    fit, lacking = [], []
    for agent in shipped_agents():
        missing = sorted(set(load_agent(agent).tool_roles.values()) - set(tools))
        if missing:
            lacking.append(f"{agent} (lacks {', '.join(missing)})")
        else:
            fit.append(agent)
    others = f"; not {', '.join(lacking)}" if lacking else ""
    return Finding(Level.OK, "agents", f"enough for {', '.join(fit) or 'no shipped agent'}{others}")
