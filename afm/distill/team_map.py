"""The YAML that maps the work of another framework's team to an agent: members, tools and programs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator

from afm.agents import AgentSpec
from afm.configuration import Settings, read_file, validated
from afm.errors import ConfigError, DataError, suggestion
from afm.trajectory.programs import CODE_TOOL, program_argument


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"a regular expression: {error}") from None
    return pattern


def _one_group(pattern: str) -> str:
    if re.compile(_compiles(pattern)).groups != 1:
        raise ValueError("a regular expression with exactly one group")
    return pattern


Pattern = Annotated[str, AfterValidator(_compiles)]
GroupPattern = Annotated[str, AfterValidator(_one_group)]


class MessageRule(Settings):
    """The role of some messages. The first matching rule applies."""

    agent: str = "*"
    """Pattern of the member's name. ``*`` stands for any characters."""
    asked: Pattern | None = None
    """Pattern to find in the last message to the member. The default matches anything."""
    says: Pattern | None = None
    """Pattern to find in the member's message."""
    role: str | None
    """A role of the agent. ``None`` leaves the message out."""

    def fits(self, agent: str, asked: str, said: str) -> bool:
        """Return whether the rule matches a message."""
        return (
            fnmatchcase(agent, self.agent)
            and (self.asked is None or re.search(self.asked, asked) is not None)
            and (self.says is None or re.search(self.says, said) is not None)
        )


class ToolRule(Settings):
    """The agent's tool for a tool of the team."""

    tool: str
    """The agent's tool."""
    argument: str | None = None
    """The parameter whose value is the text of a call. The default is the only parameter."""
    template: str = "{}"
    """Form of the agent's call, in which ``{}`` stands for that value."""
    result: GroupPattern | None = None
    """Pattern that finds the tool's result in the team's text. Its group is the result."""

    def call_text(self, value: str) -> str:
        """Return a call in the agent's form."""
        text = self.template.replace("{}", value)
        return program_argument(text) if self.tool == CODE_TOOL else text

    def result_in(self, text: str) -> str:
        """Return the tool's result within the team's text.

        Raises:
            DataError: The pattern does not match.
        """
        match = re.search(self.result, text) if self.result is not None else None
        if self.result is not None and match is None:
            raise DataError(f"{self.tool}: its `result` pattern finds nothing in {text[:80]!r}")
        return match[1] if match is not None else text


def parameter_text(arguments: Any, parameter: str | None, tool: str) -> str:
    """Return the text of the given parameter of a call, or of the only one.

    Raises:
        DataError: The parameter is missing, or there are several.
    """
    if not isinstance(arguments, Mapping):
        return plain_text(arguments)
    if parameter is not None and parameter in arguments:
        return plain_text(arguments[parameter])
    if parameter is None and len(arguments) == 1:
        return plain_text(next(iter(arguments.values())))
    expected = repr(parameter) if parameter is not None else "one; name it in the team map"
    raise DataError(f"{tool}: got the parameters {sorted(arguments)}, expected {expected}")


def plain_text(value: Any) -> str:
    """Return a text unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class AnswerRule(Settings):
    """The place of the final answer if no tool call holds it."""

    agent: str
    """Pattern of the member whose last message holds the answer."""
    pattern: GroupPattern | None = None
    """Pattern whose group is the answer. Text before it is the member's message. By default the whole text is the answer."""


class Programs(Settings):
    """Members that write programs with tools as functions."""

    pattern: GroupPattern = r"(?s)(?:<(?:code)>|```(?:py|python)?\n)(.*?)(?:</(?:code)>|```|\Z)"
    """Pattern that finds the program in a message. Its group is the code."""
    tool: ToolRule | None = None
    """The agent's tool for whole programs. Without it, the only tool that a program calls becomes the step."""
    results: tuple[GroupPattern, ...] = (
        r"(?s)\AExecution logs:\n(.+)Last output from code snippet:\n",
        r"(?s)Last output from code snippet:\n(.*)\Z",
    )
    """Patterns that find the printed text, or the value of the last line, in the output. The first match counts."""


class TeamMap(Settings):
    """The YAML."""

    messages: tuple[MessageRule, ...] = ()
    """Rules ``{agent, asked, says, role}`` with patterns of the member's name, of the last message to it, and of its
    message. The first matching rule applies. ``role: null`` leaves a message out. Text without a rule becomes a
    thought."""
    tools: dict[str, ToolRule] = Field(default_factory=dict)
    """``{THEIRS: {tool: OURS, argument: PARAMETER, template: "...{}...", result: PATTERN}}``, or ``THEIRS: OURS`` for calls
    with one parameter."""
    finals: dict[str, str] = Field(default_factory=dict)
    """``{TOOL: PARAMETER}``: calls that hold an answer. The last one of a task is the team's answer. Earlier ones are
    reports of members."""
    delegates: tuple[str, ...] = ()
    """Tools that call another member. Only that member's own work becomes steps."""
    answer: AnswerRule | None = None
    """``{agent, pattern}`` for teams without ``finals``: the last message of that member."""
    programs: Programs | None = None
    """``{pattern, tool, results}`` for members that write programs, such as smolagents' ``CodeAgent``. The labels
    ``Thought:`` and ``Code:`` of their words are removed. With ``tool`` each program is a call of the agent's code tool, in
    the fence that the tool reads. Without it, a program must print what one tool returned and nothing else."""
    observation: GroupPattern = r"(?s)\A(?:Call id: [^\n]*\n)?(?:Observation:\n?|(?=Error:\n))(.*)\Z"
    """Finds a tool's result in a message of the user. Its group is the result."""
    reasoning: bool = False
    """Whether to add hidden reasoning (``reasoning_content``) to the thought."""
    ignored: tuple[str, ...] = ()
    """Patterns of members whose calls are ignored."""
    optional: tuple[str, ...] = ()
    """Roles whose messages are left out wherever the agent's order forbids them."""
    missing_thought: str = ""
    """Text for a thought that the agent needs and no member had (``missing thought`` in ``provenance``). Without it these
    tasks are dropped."""
    missing_last_thought: str = ""
    """As ``missing_thought``, before the final answer."""

    @field_validator("tools", mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        """Expand the short form ``THEIRS: OURS``."""
        if not isinstance(value, Mapping):
            return value
        return {name: {"tool": rule} if isinstance(rule, str) else rule for name, rule in value.items()}

    @classmethod
    def read(cls, path: Path, spec: AgentSpec) -> TeamMap:
        """Read the map in a YAML, and check it against the agent.

        Raises:
            ConfigError: The map is invalid, or contains a role or tool that the agent lacks.
        """
        team_map = validated(cls, read_file(path, "team map"), str(path))
        try:
            return team_map.checked(spec)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def checked(self, spec: AgentSpec) -> TeamMap:
        """Return this map if it suits the agent.

        Raises:
            ConfigError: The map contains a role or tool that ``spec`` lacks.
        """
        tools = set(spec.tool_roles.values())
        named = [(f"tools.{name}", rule) for name, rule in self.tools.items()]
        if self.programs is not None and self.programs.tool is not None:
            named.append(("programs.tool", self.programs.tool))
        for place, rule in named:
            if rule.tool not in tools:
                raise ConfigError(
                    f"{place}: {rule.tool!r} is not a tool of agent {spec.name!r}; {suggestion(rule.tool, tools)}"
                )
        roles = [rule.role for rule in self.messages if rule.role is not None]
        for role in (*roles, *self.optional):
            if role not in spec.roles:
                raise ConfigError(
                    f"messages: {role!r} is not a role of agent {spec.name!r}; {suggestion(role, spec.roles)}"
                )
        if not spec.thought_roles and not any(rule == MessageRule(role=rule.role) for rule in self.messages):
            raise ConfigError(
                f"messages: agent {spec.name!r} has no thoughts; end with a rule for all messages"
            )
        return self

    def role_of(self, agent: str, asked: str, said: str, spec: AgentSpec) -> str | None:
        """Return the role of a message, or ``None`` if it is left out."""
        for rule in self.messages:
            if rule.fits(agent, asked, said):
                return rule.role
        return spec.thought_roles[0]

    def ignores(self, agent: str) -> bool:
        """Return whether a member's calls are ignored."""
        return any(fnmatchcase(agent, pattern) for pattern in self.ignored)
