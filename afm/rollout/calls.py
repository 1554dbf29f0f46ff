"""Tool calls of one episode: duplicates noticed, failures put into words, everything recorded."""

from __future__ import annotations

import time
from collections.abc import Mapping

from afm.agents import AgentSpec
from afm.agents.spec import Limits
from afm.errors import ConfigError, SandboxUnavailableError
from afm.tools import Tool, ToolResult
from afm.trajectory import observation_text
from afm.trajectory.record import CallRecord

DUPLICATE_NOTICE = (
    "This exact call was made before and its result stands above. "
    "Use that result, change the call, or go on with another function."
)


class Caller:
    """Runs the tool calls of one episode.

    Raises:
        ConfigError: The agent has a tool role whose tool is not among ``tools``.
    """

    def __init__(self, spec: AgentSpec, tools: Mapping[str, Tool], limits: Limits) -> None:
        if missing := sorted(set(spec.tool_roles.values()) - set(tools)):
            given = ", ".join(sorted(tools)) or "none"
            raise ConfigError(f"agent {spec.name!r} needs the tools {missing}; given: {given}")
        self._spec = spec
        self._tools = tools
        self._limits = limits
        self._seen: set[tuple[str, str]] = set()
        self.records: list[CallRecord] = []

    async def call(self, role: str, argument: str) -> str:
        """Run the tool of ``role`` and return what the environment appends to the response."""
        name = self._spec.tool_roles[role]
        key = (name, argument.strip())
        duplicate = key in self._seen and self._limits.duplicate_calls == "notice"
        self._seen.add(key)
        begun = time.perf_counter()
        result = ToolResult(DUPLICATE_NOTICE) if duplicate else await _run(self._tools[name], argument)
        text = observation_text(result.text, self._spec, self._limits.max_observation_chars)
        self.records.append(
            CallRecord(
                role=role,
                tool=name,
                argument=argument,
                observation=text,
                ok=result.ok,
                duplicate=duplicate,
                seconds=time.perf_counter() - begun,
            )
        )
        return text


async def _run(tool: Tool, argument: str) -> ToolResult:
    try:
        return await tool.call(argument)
    except SandboxUnavailableError:
        raise  # nothing can run on this machine: that is no episode's business
    except Exception as error:  # noqa: BLE001 - a tool is foreign code; its failure is an observation
        return ToolResult(
            f"The tool failed ({type(error).__name__}: {error}). Its result is unknown.", ok=False
        )
