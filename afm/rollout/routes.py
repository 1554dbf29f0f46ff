"""Which agent works on which row: the ``agents:`` of a recipe, the same for training and evaluation.

::

    agent: code
    agents:
      code: {data_sources: [livecodebench*, codecontests*]}       # the rest as at the top level
      math: {agent: math, data_sources: [math_dapo, aime*], limits: {max_turns: 4}}
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from afm.agents import AgentSpec, Limits, PromptMode, PromptSource, PromptTemplate
from afm.agents.spec import AnswerFormat
from afm.errors import ConfigError, DataError
from afm.rewards.text_match import kind_of_gold

ROUTE_KEY = "route"
"""Where a record's provenance says under which name of ``agents:`` it was made."""
HOPELESS_ADVICE = "name them under `agents` for one that can, or correct their data_source"
"""What to do about rows that their agent can never solve."""
_SHORT_ANSWERS = ("math", "exact_match", "f1", "substring", "choice")
_LISTED = 5

_OWN = PromptSource()

Source = Path | dict[str, Any] | None
"""A YAML, its content, or nothing."""
OpenedT = TypeVar("OpenedT")


class AgentRoute(BaseModel):
    """One entry of ``agents:``; what it does not say it takes from the top level."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    agent: str | None = None
    """Name of a shipped agent, or path of a YAML."""
    data_sources: tuple[str, ...] = ()
    """Rows that it takes, ``*`` for anything; case does not matter."""
    abilities: tuple[str, ...] = ()
    """The same by the column ``ability``; a row needs one of the two. Without both it takes every row."""
    tools: Path | dict[str, Any] | None = None
    """Path of a tool YAML, or its content; replaces that of the top level."""
    rewards: Path | dict[str, Any] | None = None
    """Path of a reward YAML, or its content; replaces that of the top level."""
    limits: dict[str, Any] = Field(default_factory=dict)
    """Merged into those of the top level."""
    prompt: str | None = None
    """``own``, ``row`` or a file with ``{question}``; see :mod:`afm.agents.prompt_source`."""

    @field_validator("data_sources", "abilities", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("limits")
    @classmethod
    def _known_limits(cls, value: dict[str, Any]) -> dict[str, Any]:
        return Limits.check_overrides(value)


AgentRoutes = Annotated[
    dict[Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")], AgentRoute],
    BeforeValidator(lambda value: {} if value is None else value),
]
"""The section ``agents:``, in the order written; ``null`` takes it away."""


@dataclass(frozen=True, slots=True)
class Route:
    """An agent with everything its rows are worked on with.

    Attributes:
        name: Its key in ``agents:``; empty where all rows have one agent.
        declared: The agent as its YAML has it.
        limits: Its own, with the overrides of the settings.
        prompt: Where the prompts of its rows come from.
    """

    name: str
    declared: AgentSpec
    limits: Limits
    tools: Source
    rewards: Source
    data_sources: tuple[str, ...] = ()
    abilities: tuple[str, ...] = ()
    prompt: PromptSource = _OWN

    @property
    def spec(self) -> AgentSpec:
        """The agent with these limits."""
        return self.declared.model_copy(update={"limits": self.limits})

    @property
    def key(self) -> str:
        """Its path in the YAML, for errors."""
        return f"agents.{self.name}" if self.name else "agent"

    @property
    def takes_all(self) -> bool:
        """Whether it takes every row."""
        return not self.data_sources and not self.abilities

    def takes(self, data_source: str, ability: str) -> bool:
        """Whether a row of this kind is its own."""
        return self.takes_all or _matches(data_source, self.data_sources) or _matches(ability, self.abilities)


@dataclass(frozen=True, slots=True)
class Routes:
    """The agents of a run, in the order in which rows are offered to them."""

    all: tuple[Route, ...]

    def __iter__(self) -> Iterator[Route]:
        return iter(self.all)

    @property
    def by_row(self) -> bool:
        """Whether rows choose their agent."""
        return bool(self.all[0].name)

    @property
    def first(self) -> Route:
        """The run's main agent: used when a question names no agent."""
        return self.all[0]

    @property
    def specs(self) -> tuple[AgentSpec, ...]:
        """Each agent once, with its limits, the first one first."""
        return tuple({route.declared.name: route.spec for route in reversed(self.all)}.values())[::-1]

    @property
    def max_response_tokens(self) -> int | None:
        """Of the agent with the most; ``None`` when one has no limit."""
        most = [route.limits.max_response_tokens for route in self.all]
        bounded = [limit for limit in most if limit is not None]
        return max(bounded) if len(bounded) == len(most) else None

    def filled_by(self, template: PromptTemplate | None) -> Routes:
        """The same, with what ``prompt: row`` asks rows without a prompt with."""
        return Routes(tuple(replace(route, prompt=route.prompt.filled_by(template)) for route in self.all))

    def find(self, data_source: str, ability: str = "") -> Route | None:
        """The agent of a row, ``None`` when nothing takes it."""
        return next((route for route in self.all if route.takes(data_source, ability)), None)

    def of(self, data_source: str, ability: str = "") -> Route:
        """The agent of a row.

        Raises:
            DataError: Nothing takes it.
        """
        route = self.find(data_source, ability)
        if route is None:
            raise DataError(f"{self.lack(data_source, ability)}; {self.advice}")
        return route

    def lack(self, data_source: str, ability: str) -> str:
        """That nothing takes such a row, in words."""
        kind = f"data_source {data_source!r}" + (f" and ability {ability!r}" if ability else "")
        return f"no entry of `agents` takes rows of {kind}"

    @property
    def advice(self) -> str:
        """What to do about a row that nothing takes."""
        names = ", ".join(route.name for route in self.all)
        return f"name it under data_sources of one of {names}, or add an entry without data_sources and abilities"

    def check(self, kinds: Mapping[tuple[str, str], int], where: str) -> list[str]:
        """Compare with the numbers of rows by data source and ability: a warning for each list with patterns that no row matches.

        Raises:
            DataError: Rows that nothing takes.
        """
        lacking = {kind: count for kind, count in kinds.items() if self.find(*kind) is None}
        if lacking:
            faults = [f"{self.lack(*kind)} ({count:,} rows)" for kind, count in lacking.items()]
            more = f"; and {len(faults) - _LISTED} other kinds" if len(faults) > _LISTED else ""
            raise DataError(f"{where}: {'; '.join(faults[:_LISTED])}{more}; {self.advice}")
        return [f"{key}: no row of {where} matches {', '.join(idle)}" for key, idle in self._idle(kinds)]

    def _idle(self, kinds: Mapping[tuple[str, str], int]) -> Iterator[tuple[str, list[str]]]:
        for route in self.all:
            own = [kind for kind in kinds if self.find(*kind) is route]
            for place, (field, patterns) in enumerate(_patterns(route)):
                values = [kind[place] for kind in own]
                idle = [
                    pattern
                    for pattern in patterns
                    if not any(_matches(value, (pattern,)) for value in values)
                ]
                if idle:
                    yield f"{route.key}.{field}", idle


def routes_of(top: AgentRoute, agents: AgentRoutes, load: Callable[[str], AgentSpec]) -> Routes:
    """The agents that settings name, at the ``top`` level and in the section ``agents`` (empty where all rows have one agent).

    Raises:
        ConfigError: No such agent, a bad declaration, or entries that contradict each other.
    """
    if not agents:
        return Routes((_route("", top, top, load),))
    routes = tuple(_route(name, entry, top, load) for name, entry in agents.items())
    _check_reach(routes)
    _check_names(routes)
    return Routes(routes)


class Opened(Generic[OpenedT]):
    """What sources open, each once however many agents name it."""

    def __init__(self, open_source: Callable[[Source], OpenedT]) -> None:
        self._open = open_source
        self._by_source: dict[str, OpenedT] = {}

    def of(self, source: Source) -> OpenedT:
        """What ``source`` opens."""
        key = json.dumps(source, sort_keys=True, default=str)
        if key not in self._by_source:
            self._by_source[key] = self._open(source)
        return self._by_source[key]

    def __iter__(self) -> Iterator[OpenedT]:
        return iter(self._by_source.values())


def mismatch(spec: AgentSpec, scorer: str, ground_truth: Any = None) -> str | None:
    """Why an agent cannot solve a row that ``scorer`` judges; else ``None``.

    Args:
        ground_truth: Of the row. ``None`` asks about the form of the agent's answers alone.
    """
    if spec.answer_format is AnswerFormat.FENCE and scorer in _SHORT_ANSWERS:
        return f"agent {spec.name!r} answers with a program in a fence, where {scorer} wants a result"
    if spec.answer_format is AnswerFormat.BOXED and scorer == "code_tests":
        return f"agent {spec.name!r} answers with a boxed result, where code_tests wants a program"
    kind = None if ground_truth is None else kind_of_gold(ground_truth)
    if scorer == "code_tests" and kind == "result":
        return "their gold is a result, where code_tests wants tests"
    if scorer in _SHORT_ANSWERS and kind == "tests":
        return f"their gold is tests of a program, where {scorer} wants a result"
    return None


def anchor_routes(data: Mapping[str, Any], place: Callable[[str], str]) -> None:
    """Rewrite, in place, the files that the entries of ``agents:`` name in a YAML."""
    agents = data.get("agents")
    for entry in agents.values() if isinstance(agents, dict) else ():
        if not isinstance(entry, dict):
            continue
        for key in ("agent", "tools", "rewards"):
            value = entry.get(key)
            if isinstance(value, str) and (key != "agent" or value.endswith((".yaml", ".yml"))):
                entry[key] = place(value)


def _route(name: str, entry: AgentRoute, top: AgentRoute, load: Callable[[str], AgentSpec]) -> Route:
    agent = entry.agent or top.agent
    if not agent:
        raise ConfigError(f"agents.{name}.agent: missing, also at the top level")
    try:
        declared = load(agent)
    except ConfigError as error:
        raise ConfigError(f"agents.{name}.agent: {error}" if name else str(error)) from None
    return Route(
        name,
        declared,
        Limits.model_validate({**declared.limits.model_dump(), **top.limits, **entry.limits}),
        entry.tools if entry.tools is not None else top.tools,
        entry.rewards if entry.rewards is not None else top.rewards,
        entry.data_sources,
        entry.abilities,
        PromptSource.load(entry.prompt or top.prompt or PromptMode.OWN),
    )


def _check_reach(routes: tuple[Route, ...]) -> None:
    """Refuse an entry, or a pattern of one, that an earlier entry leaves nothing to."""
    for before, after in pairwise(routes):
        if before.takes_all:
            raise ConfigError(
                f"{after.key} gets no row: {before.key} has neither data_sources nor abilities and takes all; put it last"
            )
    for number, later in enumerate(routes):
        for earlier in routes[:number]:
            for (field, taken), (_, wanted) in zip(_patterns(earlier), _patterns(later), strict=True):
                for pattern in wanted:
                    if _matches(pattern, taken):
                        raise ConfigError(
                            f"{later.key}.{field}: {pattern!r} is taken by {earlier.key}.{field} already; remove it "
                            "from one of them, or write the narrower entry first"
                        )


def _check_names(routes: tuple[Route, ...]) -> None:
    """Refuse two declarations of one name, which records and model folders could not tell apart."""
    known: dict[str, Route] = {}
    for route in routes:
        other = known.setdefault(route.declared.name, route)
        if other.declared != route.declared:
            raise ConfigError(
                f"{other.key} and {route.key}: two different agents are called {route.declared.name!r}; give one of the "
                "YAMLs another name"
            )


def _patterns(route: Route) -> tuple[tuple[str, tuple[str, ...]], tuple[str, tuple[str, ...]]]:
    return ("data_sources", route.data_sources), ("abilities", route.abilities)


def _matches(value: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(value.lower(), pattern.lower()) for pattern in patterns)
