"""The team that an evaluation plays: scripted, or members of a file of models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from afm.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from afm.agents import AgentSpec
    from afm.distill.model_team.team import ModelTeam
    from afm.distill.player import TeamPlayer
    from afm.distill.wiki_team import ScriptedTeam
    from afm.evaluation.config import EvalConfig

SCRIPTED = "scripted"
"""Names the embedded team of the agent in place of a file."""
EVENTS_FILE = "team_events.jsonl"
"""In the evaluation's folder: everything that the members did, attempts that failed included."""


@asynccontextmanager
async def open_team(config: EvalConfig, spec: AgentSpec) -> AsyncIterator[tuple[TeamPlayer, dict[str, Any]]]:
    """The team that ``config`` names, and what the manifest says about it; all is closed at the end.

    Raises:
        ConfigError: The team's file, its tools or its roles are wrong.
        UsageError: A change of its file is wrong.
    """
    from afm.distill.model_team.team import ModelTeam
    from afm.distill.player import TeamPlayer
    from afm.tools import load_tools

    team = _team(config, spec)
    source = config.tools or (team.settings.tools if isinstance(team, ModelTeam) else None)
    async with AsyncExitStack() as opened:
        if isinstance(team, ModelTeam):
            opened.push_async_callback(team.close)
        tools = load_tools(source) if source is not None else {}
        for tool in tools.values():
            opened.push_async_callback(tool.close)
        if missing := sorted(_tools_of(team, spec) - set(tools)):
            raise ConfigError(
                f"the team calls {missing}; `tools` has {sorted(tools)}; name a file that has all of them"
            )
        priced = isinstance(team, ModelTeam) and team.priced
        log = config.output_dir / EVENTS_FILE
        player = opened.enter_context(TeamPlayer(team, spec, team.roles, tools, log, priced=priced))
        yield player, _description(team)


def check_team(config: EvalConfig, spec: AgentSpec) -> None:
    """Read the team's file and its tools, and start nothing."""
    from afm.tools import load_tools

    _team(config, spec).roles.checked(spec)
    if config.tools is not None:
        load_tools(config.tools)


def _team(config: EvalConfig, spec: AgentSpec) -> ModelTeam | ScriptedTeam:
    from afm.distill.model_team.team import load_team
    from afm.distill.wiki_team import scripted_team

    choice = config.team
    if choice is None:
        raise ConfigError("this evaluation has a model and no team")
    if choice.file != SCRIPTED:
        return load_team(choice.file, spec, choice.changes)
    if choice.changes:
        raise UsageError(
            f"team.{choice.changes[0]}: the scripted team has no file to change; give one: team=FILE"
        )
    return scripted_team(spec, config.seed)


def _tools_of(team: ModelTeam | ScriptedTeam, spec: AgentSpec) -> set[str]:
    from afm.distill.model_team.team import ModelTeam

    if isinstance(team, ModelTeam):
        return {tool for member in team.settings.tool_agents.values() for tool in member.tools}
    return set(spec.tool_roles.values())


def _description(team: ModelTeam | ScriptedTeam) -> dict[str, Any]:
    from afm.distill.model_team.team import ModelTeam

    if not isinstance(team, ModelTeam):
        return {"members": {}}
    return {
        "members": {name: team.model_of(name) for name in team.settings.all_members},
        "limits": team.settings.limits.model_dump(mode="json"),
    }
