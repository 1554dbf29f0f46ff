"""What an expansion by model is declared by: endpoints, models, who proposes and who solves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, model_validator

from afm.configuration import Settings, apply_overrides, read_extended, validated
from afm.distill.model_team.settings import (
    MemberSettings,
    TeacherEndpoint,
    TeamModel,
    anchored,
    check_models,
)
from afm.endpoints.budget import BudgetSettings

SCOUT = "scout"


class ExpandMembers(Settings):
    """Who proposes questions, who answers them without knowing the proposed answer, and who gathers pages by web tools."""

    proposer: MemberSettings
    solver: MemberSettings
    scout: MemberSettings | None = None


class ExpandSettings(Settings):
    """An expansion's file.

    Attributes:
        data_source: Of the questions; chooses their reward.
        asks: How often a member is asked again when its reply cannot be used.
        passage_chars: Longer passages are cut at the end.
        search_tool: Name of the tool that finds pages, for questions from the web.
        page_tool: Name of the one that reads them.
    """

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    endpoints: dict[str, TeacherEndpoint] = Field(min_length=1)
    models: dict[str, TeamModel] = Field(min_length=1)
    members: ExpandMembers
    data_source: str = "expanded"
    asks: int = Field(default=3, ge=1, le=1_000)
    passage_chars: int = Field(default=4_000, ge=200)
    search_tool: str = "web_search"
    page_tool: str = "crawl_page"
    budget: BudgetSettings = BudgetSettings()

    @model_validator(mode="after")
    def _check(self) -> ExpandSettings:
        check_models(self.endpoints, self.models, self.all_members, self.budget)
        return self

    @property
    def all_members(self) -> dict[str, MemberSettings]:
        """Everybody by name."""
        members = {name: getattr(self.members, name) for name in ExpandMembers.model_fields}
        return {name: member for name, member in members.items() if member is not None}


def read_expansion(path: Path, overrides: Sequence[str] = ()) -> ExpandSettings:
    """The expansion of a YAML; it may ``extends`` another.

    Raises:
        ConfigError: Names file, key path, value and what was expected.
        UsageError: An override is wrong.
    """
    data = read_extended(path, "an expansion", anchor=anchored)
    apply_overrides(data, overrides)
    return validated(ExpandSettings, data, str(path), overrides=overrides)
