"""The YAML of a team with models: endpoints, models, members, roles, limits and budget."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from afm.configuration import Settings, apply_overrides, read_extended, validated
from afm.distill.merge import RoleMap
from afm.endpoints.budget import BudgetSettings, TokenPrice
from afm.endpoints.chat import EndpointSettings
from afm.errors import suggestion


class TeacherEndpoint(EndpointSettings):
    """One server of a team. Without ``url`` its address is TEACHER_BASE_URL."""

    key_variable: str = Field(default="TEACHER_API_KEY", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    max_parallel: int = Field(default=32, ge=1, le=10_000)
    attempts: int = Field(default=8, ge=1, le=100)
    timeout_s: float = Field(default=180.0, gt=0, le=86_400)


class TeamModel(Settings):
    """One model of an endpoint."""

    endpoint: str
    name: str | None = None
    """Its name at the server. TEACHER_MODEL_NAME if ``None``."""
    temperature: float = Field(default=0.7, ge=0, le=2)
    max_tokens: int = Field(default=2048, ge=16, le=1_000_000)
    """Maximum number of tokens of one reply."""
    system_role: bool = True
    """Whether the model's chat has the role ``system``. Otherwise the system text is put before the user's."""
    request: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request, for example ``{response_format: {type: json_object}}``."""
    price: TokenPrice | None = None
    """Required for a budget in US dollars."""

    def messages(self, system: str, user: str) -> list[dict[str, str]]:
        """Return one system and one user message, in the order that strict chat templates accept."""
        if not self.system_role:
            return [{"role": "user", "content": f"{system}\n\n{user}"}]
        return [{"role": "system", "content": system}, {"role": "user", "content": user}]

    @field_validator("request")
    @classmethod
    def _one_reply(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if wrong := sorted({"messages", "model", "n", "stream"} & set(fields)):
            raise ValueError(f"{wrong} cannot be set; a request has one reply, which is not streamed")
        return fields


class MemberSettings(Settings):
    """One member: its model, and templates that replace the shipped ``prompt`` or its message in the trajectory (``says``)."""

    model: str
    prompt: Path | None = None
    says: str | None = None


class ToolAgentSettings(MemberSettings):
    """A member that works on sub-tasks with its tools."""

    tools: tuple[str, ...] = Field(min_length=1)
    purpose: str = ""
    """A description for the planner, which chooses among several tool agents."""
    argument: str = "{{ argument }}"
    """Template of the text to call a tool with, from ``{{ argument }}``."""


class Members(Settings):
    """The members of a team. The writer suggests an answer, and gives it once the verifier accepts it."""

    planner: MemberSettings
    reflector: MemberSettings
    verifier: MemberSettings
    writer: MemberSettings


class Reflect(StrEnum):
    """When the reflector reviews the work."""

    STEP = "step"
    """After each sub-task except the last."""
    CALL = "call"
    """After each tool call."""


class Replan(StrEnum):
    """What follows a setback."""

    PLAN = "plan"
    """A new plan."""
    CONTINUE = "continue"
    """The criticism as the next sub-task, for agents that plan once."""


class TeamLimits(Settings):
    """When the team gives up."""

    rounds: int = Field(default=4, ge=1, le=1_000)
    """Number of suggested answers that are checked."""
    plans: int = Field(default=4, ge=1, le=1_000)
    """Total number of plans, including the first one."""
    steps: int = Field(default=6, ge=1, le=1_000)
    """Number of sub-tasks of one plan to work on."""
    calls_per_step: int = Field(default=3, ge=1, le=1_000)
    """Number of tool calls for one sub-task."""
    tool_calls: int = Field(default=20, ge=1, le=1_000)
    """Total number of tool calls."""
    asks: int = Field(default=3, ge=1, le=1_000)
    """Maximum number of requests to a member for one usable reply."""
    shown_results: int = Field(default=2, ge=1, le=1_000)
    """Number of the last tool results that are shown in full. Earlier ones are shown as findings."""
    shown_chars: int = Field(default=6_000, ge=200)
    """Maximum number of characters of one shown result. Longer ones lose their middle."""


class TeacherSettings(Settings):
    """Members of any kind with their models. The files of teams and of expansions share these keys."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """The team's name in records and reports."""
    endpoints: dict[str, TeacherEndpoint] = Field(min_length=1)
    """Servers by name: ``url`` (else ``TEACHER_BASE_URL``), ``key_variable``, ``requests_per_minute``,
    ``tokens_per_minute``, ``max_parallel``, ``attempts``, ``timeout_s``."""
    models: dict[str, TeamModel] = Field(min_length=1)
    """Models by name: ``endpoint``, ``name`` at the server (else ``TEACHER_MODEL_NAME``), ``temperature``,
    ``max_tokens``, ``request`` (further fields), ``system_role: false`` for models without one,
    ``price`` in US dollars for a million tokens."""
    members: Settings
    """The model of each member."""
    budget: BudgetSettings = BudgetSettings()
    """``usd``, ``tokens`` and ``calls`` of the whole run, including earlier parts."""

    @property
    def all_members(self) -> dict[str, MemberSettings]:
        """Everybody by name."""
        return {name: member for name, member in self.members if member is not None}

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        """Reject unknown names, and a budget in US dollars without prices."""
        if self.budget.file is not None:
            raise ValueError(
                "budget.file: not supported for a team; its budget is counted from the events in the run's folder"
            )
        for name, model in self.models.items():
            if model.endpoint not in self.endpoints:
                hint = suggestion(model.endpoint, self.endpoints)
                raise ValueError(f"models.{name}.endpoint: got {model.endpoint!r}; {hint}")
            if self.budget.usd is not None and model.price is None:
                raise ValueError(
                    f"models.{name}.price: missing, but needed for a budget in money (budget.usd)"
                )
        for name, member in self.all_members.items():
            if member.model not in self.models:
                raise ValueError(
                    f"{name}.model: got {member.model!r}; {suggestion(member.model, self.models)}"
                )
        return self


class TeamSettings(TeacherSettings):
    """A team's file."""

    agent: str
    """The agent whose trajectories the team's work becomes: the name of a shipped agent, or a YAML."""
    tools: Path
    """Tools YAML, relative to the team's file."""
    members: Members
    """``planner``, ``reflector``, ``verifier`` and ``writer``, each with its ``model``, a ``prompt`` (a YAML of Jinja
    templates that replaces the shipped one) and ``says`` (template of its message in the trajectory)."""
    tool_agents: dict[str, ToolAgentSettings] = Field(min_length=1)
    """Members that work with tools, by name: a model as above, ``tools``, ``purpose`` (for the planner) and ``argument``
    (template of the text to call a tool with)."""
    roles: RoleMap
    """The role of the agent that each member plays. ``silent`` members leave no message, ``optional`` ones only where the
    agent's order allows it. ``missing_thought`` replaces a missing thought."""
    reflect: Reflect = Reflect.STEP
    """After each ``step``, or after each tool ``call``."""
    replan: Replan = Replan.PLAN
    """After a setback, make a new ``plan``, or ``continue`` with the criticism as the next sub-task."""
    accept_score: int = Field(default=3, ge=1, le=4)
    """Lowest score of the verifier, from 1 to 4, with which a suggested answer is given."""
    limits: TeamLimits = TeamLimits()
    """When the team gives up: ``rounds``, ``plans``, ``steps``, ``calls_per_step``, ``tool_calls`` and ``asks``.
    ``shown_results`` and ``shown_chars`` bound the results that are shown."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if taken := set(Members.model_fields) & set(self.tool_agents):
            raise ValueError(f"tool_agents: {sorted(taken)[0]!r} is the name of another member")
        return self

    @property
    def all_members(self) -> dict[str, MemberSettings]:
        """Everybody by name."""
        return {**super().all_members, **self.tool_agents}

    @property
    def called_tools(self) -> set[str]:
        """Names of the tools that its members call."""
        return {tool for member in self.tool_agents.values() for tool in member.tools}


def read_team(path: Path, overrides: Sequence[str] = ()) -> TeamSettings:
    """Read the team of a YAML, which may extend another (``extends``). Paths are relative to the file that names them.

    Raises:
        ConfigError: Names file, key path, value and what was expected.
        UsageError: An override is wrong.
    """
    data = read_extended(path, "a team", anchor=anchored)
    apply_overrides(data, overrides)
    return validated(TeamSettings, data, str(path), overrides=overrides)


def anchored(data: dict[str, Any], folder: Path) -> None:
    """Make the paths of one file absolute."""
    for key in ("tools", "rewards"):
        _anchor(data, key, folder)
    agent = data.get("agent")
    if isinstance(agent, str) and agent.endswith((".yaml", ".yml")):
        _anchor(data, "agent", folder)
    for group in ("members", "tool_agents"):
        for member in (data.get(group) or {}).values() if isinstance(data.get(group), dict) else ():
            if isinstance(member, dict):
                _anchor(member, "prompt", folder)


def _anchor(data: dict[str, Any], key: str, folder: Path) -> None:
    value = data.get(key)
    if isinstance(value, str):
        data[key] = str((folder / value).resolve())
