"""The embedded teacher that can play a given agent."""

from __future__ import annotations

from typing import Protocol

from afm.agents import AgentSpec
from afm.distill.checking_team import CheckingWikiTeam
from afm.distill.collect import Team
from afm.distill.filters.rules import checking_role
from afm.distill.merge import RoleMap
from afm.distill.team import ScriptedMathTeam
from afm.distill.wiki_team import ScriptedWikiTeam
from afm.errors import ConfigError


class ScriptedTeam(Team, Protocol):
    """A team of rules that knows which role of the agent each of its members plays."""

    @property
    def roles(self) -> RoleMap:
        """For :func:`afm.distill.distill`.

        Raises:
            ConfigError: The agent's roles do not suit the team.
        """
        ...


def scripted_team(spec: AgentSpec, seed: int = 0) -> ScriptedTeam:
    """The team that works with the one tool of ``spec``: ``code`` or ``wiki_search``, with or without a check of the answer.

    Raises:
        ConfigError: No team does.
    """
    tools = tuple(spec.tool_roles.values())
    if tools == ("code",):
        return ScriptedMathTeam(spec, seed)
    if tools == ("wiki_search",):
        return (
            CheckingWikiTeam(spec, seed) if checking_role(spec) is not None else ScriptedWikiTeam(spec, seed)
        )
    raise ConfigError(
        f"agent {spec.name!r} has the tools {list(tools)}; the scripted teams need exactly one of code and wiki_search"
    )
