"""The tool calls of an episode. Every failure becomes an observation, and a repeated call is not run again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from afm.agents.spec import AgentSpec
from afm.errors import AfmError, OwnCodeError, RepeatedErrors, ReplayError, SandboxUnavailableError
from afm.plugins import fault_of
from afm.tools import check_tools
from afm.tools.base import Tool, ToolResult, call_tool
from afm.trajectory.record import CallRecord
from afm.trajectory.tags import Step

_LOG = logging.getLogger(__name__)
_BUGS = RepeatedErrors()  # a bug may fail in every call of an evaluation

REPEATED = (
    "This exact call was made before and was not run again. "
    "Use the result you already have, or make a different call."
)


def tools_by_role(spec: AgentSpec, tools: Mapping[str, Tool]) -> dict[str, Tool]:
    """Return the tool of each tool role.

    Raises:
        ConfigError: A tool is missing.
    """
    check_tools(f"agent {spec.name!r}", spec.tool_roles.values(), tools)
    return {role: tools[name] for role, name in spec.tool_roles.items()}


class ToolCaller:
    """Runs the calls of one episode by role. Failures become text, and repeated calls are not run again."""

    def __init__(self, tools: Mapping[str, Tool], *, run_repeated: bool) -> None:
        self._tools = tools
        self._run_repeated = run_repeated
        self._answered: set[tuple[str, str]] = set()

    def tool_name(self, role: str) -> str:
        """Return the name of the tool that ``role`` calls."""
        return self._tools[role].name

    async def call(self, step: Step, seconds_left: float | None) -> tuple[CallRecord, bool]:
        """Run one call for at most ``seconds_left``.

        A failed call may be repeated. A repeated call that was answered is a duplicate.

        Returns:
            The call with the tool's unchanged text as its ``observation``, and whether time ran out.
        """
        tool = self._tools[step.role]
        key = (tool.name, step.content.strip())
        begun = time.perf_counter()
        late, duplicate = False, key in self._answered and not self._run_repeated
        if duplicate:
            result = ToolResult(REPEATED)
        else:
            result, late = await _bounded(tool, step.content, seconds_left)
        if result.ok:
            self._answered.add(key)
        record = CallRecord(
            role=step.role,
            tool=tool.name,
            argument=step.content,
            observation=result.text,
            ok=result.ok,
            duplicate=duplicate,
            seconds=time.perf_counter() - begun,
        )
        return record, late


async def _bounded(tool: Tool, argument: str, seconds_left: float | None) -> tuple[ToolResult, bool]:
    try:
        async with asyncio.timeout(seconds_left) as timer:
            return await _run(tool, argument), False
    except TimeoutError:
        if not timer.expired():
            raise
        text = f"The tool {tool.name} gave no answer in the time that was left for this task."
        return ToolResult(text, ok=False), True


async def _run(tool: Tool, argument: str) -> ToolResult:
    try:
        result = await call_tool(tool.name, tool, argument)
    except (ReplayError, SandboxUnavailableError):  # no later call can succeed
        raise
    except AfmError as error:
        if isinstance(error, OwnCodeError):
            _warn(str(error))
        return ToolResult(f"The tool {tool.name} failed: {error}", ok=False)
    except Exception as error:  # noqa: BLE001 - a tool is foreign code, and the agent must handle its failure
        fault = fault_of(error)
        _warn(f"the tool {tool.name!r} failed: {fault}", fault_of(error, message=False))
        return ToolResult(f"The tool {tool.name} failed: {fault}", ok=False)
    if not result.ok and not result.text.strip():
        return ToolResult(f"The tool {tool.name} failed without saying why.", ok=False, meta=result.meta)
    return result


def _warn(bug: str, kind: str = "") -> None:
    """Log a bug in a tool for its author, three times for each kind. The agent only works around it."""
    if _BUGS.is_new(bug, kind):
        _LOG.warning("%s (the agent reads this as the observation)", bug)
