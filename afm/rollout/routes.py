"""The agent of each row: the section ``agents:`` of a recipe, for training and evaluation.

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

from pydantic import BeforeValidator, Field

from afm.agents import AgentSpec, LimitOverrides, Limits, PromptMode, PromptSource, PromptTemplate
from afm.agents.spec import AnswerFormat
from afm.configuration import OneOrMany, Settings
from afm.errors import ConfigError, DataError
from afm.rewards.text_match import kind_of_gold
from afm.terminal import plural

ROUTE_KEY = "route"
"""The key in a record's provenance with the name of its entry in ``agents:``."""
HOPELESS_ADVICE = "list them in `agents` for an agent that can, or correct their data_source"
"""Advice on rows that their agent can never solve."""
_SHORT_ANSWERS = ("math", "exact_match", "f1", "substring", "choice")
_LISTED = 5

_OWN = PromptSource()

Source = Path | dict[str, Any] | None
"""The path of a YAML, its content, or ``None``."""
OpenedT = TypeVar("OpenedT")


class AgentRoute(Settings):
    """One entry of ``agents:``. Missing keys are taken from the top level."""

    agent: str | None = None
    """Name of a shipped agent, or path of a YAML."""
    data_sources: OneOrMany[str] = ()
    """Patterns of the data sources of its rows, with ``*`` for any text. Case does not matter."""
    abilities: OneOrMany[str] = ()
    """Patterns of the column ``ability``. A row must match one of the two lists, if there are any."""
    tools: Path | dict[str, Any] | None = None
    """Path of a tools YAML, or its content. Replaces the one at the top level."""
    rewards: Path | dict[str, Any] | None = None
    """Path of a rewards YAML, or its content. Replaces the one at the top level."""
    limits: LimitOverrides = Field(default_factory=dict)
    """Limits that are merged into those at the top level."""
    prompt: str | None = None
    """``own``, ``row`` or a file with ``{question}``. See :mod:`afm.agents.prompt_source`."""


AgentRoutes = Annotated[
    dict[Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")], AgentRoute],
    BeforeValidator(lambda value: {} if value is None else value),
]
"""The section ``agents:`` in its order. ``null`` removes it."""


@dataclass(frozen=True, slots=True)
class Route:
    """An agent with its limits, tools, rewards and prompts.

    Attributes:
        name: Its key in ``agents:``, empty if all rows have one agent.
        declared: The agent as its YAML declares it.
        limits: The agent's limits with the overrides of the settings.
        prompt: The source of the prompts of its rows.
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
        """The agent with the limits of the route."""
        return self.declared.model_copy(update={"limits": self.limits})

    @property
    def key(self) -> str:
        """The route's path in the YAML, for error messages."""
        return f"agents.{self.name}" if self.name else "agent"

    @property
    def takes_all(self) -> bool:
        """Whether the route takes every row."""
        return not self.data_sources and not self.abilities

    def takes(self, data_source: str, ability: str) -> bool:
        """Return whether the route takes rows with this data source and ability."""
        return self.takes_all or _matches(data_source, self.data_sources) or _matches(ability, self.abilities)


@dataclass(frozen=True, slots=True)
class Routes:
    """The agents of a run. Each row goes to the first one that takes it."""

    all: tuple[Route, ...]

    def __iter__(self) -> Iterator[Route]:
        return iter(self.all)

    @property
    def by_row(self) -> bool:
        """Whether rows choose their agent."""
        return bool(self.all[0].name)

    @property
    def first(self) -> Route:
        """The run's main agent, which plays questions that name no agent."""
        return self.all[0]

    @property
    def specs(self) -> tuple[AgentSpec, ...]:
        """The distinct agents with their limits, in order."""
        return tuple({route.declared.name: route.spec for route in reversed(self.all)}.values())[::-1]

    @property
    def max_response_tokens(self) -> int | None:
        """The largest ``max_response_tokens`` of the agents, or ``None`` if one has no limit."""
        most = [route.limits.max_response_tokens for route in self.all]
        bounded = [limit for limit in most if limit is not None]
        return max(bounded) if len(bounded) == len(most) else None

    def filled_by(self, template: PromptTemplate | None) -> Routes:
        """Return the routes that, with ``prompt: row``, use ``template`` for rows without a prompt."""
        return Routes(tuple(replace(route, prompt=route.prompt.filled_by(template)) for route in self.all))

    def find(self, data_source: str, ability: str = "") -> Route | None:
        """Return the route of a row, or ``None`` if no route takes it."""
        return next((route for route in self.all if route.takes(data_source, ability)), None)

    def of(self, data_source: str, ability: str = "") -> Route:
        """Return the route of a row.

        Raises:
            DataError: No route takes the row.
        """
        route = self.find(data_source, ability)
        if route is None:
            raise DataError(f"{self.lack(data_source, ability)}; {self.advice}")
        return route

    def lack(self, data_source: str, ability: str) -> str:
        """Return a message that no entry takes rows of this kind."""
        kind = f"data_source {data_source!r}" + (f" and ability {ability!r}" if ability else "")
        return f"no entry of `agents` takes rows of {kind}"

    @property
    def advice(self) -> str:
        """Advice on a row that no route takes."""
        names = ", ".join(route.name for route in self.all)
        return (
            f"list it in data_sources of one of {names}, or add an entry without data_sources and abilities"
        )

    def check(self, kinds: Mapping[tuple[str, str], int], where: str) -> list[str]:
        """Check the numbers of rows by data source and ability. Return a warning per list with unmatched patterns.

        Raises:
            DataError: No route takes some of the rows.
        """
        lacking = {kind: count for kind, count in kinds.items() if self.find(*kind) is None}
        if lacking:
            faults = [f"{self.lack(*kind)} ({plural(count, 'row')})" for kind, count in lacking.items()]
            more = f"; and {plural(len(faults) - _LISTED, 'other kind')}" if len(faults) > _LISTED else ""
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
    """Return the agents of settings: the one at the ``top`` level, or those in the section ``agents`` if it is not empty.

    Raises:
        ConfigError: An agent does not exist, a declaration is invalid, or entries contradict each other.
    """
    if not agents:
        return Routes((_route("", top, top, load),))
    routes = tuple(_route(name, entry, top, load) for name, entry in agents.items())
    _check_reach(routes)
    _check_names(routes)
    return Routes(routes)


class Opened(Generic[OpenedT]):
    """Opens sources, each only once even if several agents name it."""

    def __init__(self, open_source: Callable[[Source], OpenedT]) -> None:
        self._open = open_source
        self._by_source: dict[str, OpenedT] = {}

    def of(self, source: Source) -> OpenedT:
        """Return the object that ``source`` opens."""
        key = json.dumps(source, sort_keys=True, default=str)
        if key not in self._by_source:
            self._by_source[key] = self._open(source)
        return self._by_source[key]

    def __iter__(self) -> Iterator[OpenedT]:
        return iter(self._by_source.values())


def mismatch(spec: AgentSpec, scorer: str, ground_truth: Any = None) -> str | None:
    """Return why an agent cannot solve a row that ``scorer`` judges, or ``None`` if it can.

    Args:
        ground_truth: The row's ground truth. With ``None``, only the form of the agent's answers is checked.
    """
    if spec.answer_format is AnswerFormat.FENCE and scorer in _SHORT_ANSWERS:
        return f"agent {spec.name!r} answers with a program in a fence, but {scorer} expects a result"
    if spec.answer_format is AnswerFormat.BOXED and scorer == "code_tests":
        return f"agent {spec.name!r} answers with a boxed result, but code_tests expects a program"
    kind = None if ground_truth is None else kind_of_gold(ground_truth)
    if scorer == "code_tests" and kind == "result":
        return "their gold is a result, but code_tests expects tests"
    if scorer in _SHORT_ANSWERS and kind == "tests":
        return f"their gold is tests of a program, but {scorer} expects a result"
    return None


def anchor_routes(data: dict[str, Any], place: Callable[[str], str]) -> None:
    """Rewrite in place the agents, tools and rewards that a YAML and the entries of its ``agents:`` name as files."""
    agents = data.get("agents")
    for entry in (data, *(agents.values() if isinstance(agents, dict) else ())):
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
    """Refuse an entry or a pattern that gets no rows because of an earlier entry."""
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
                            f"{later.key}.{field}: {earlier.key}.{field} already takes {pattern!r}; remove it "
                            "from one of them, or put the narrower entry first"
                        )


def _check_names(routes: tuple[Route, ...]) -> None:
    """Refuse two declarations with the same name, because records and model folders refer to agents by name."""
    known: dict[str, Route] = {}
    for route in routes:
        other = known.setdefault(route.declared.name, route)
        if other.declared != route.declared:
            raise ConfigError(
                f"{other.key} and {route.key}: two different agents are called {route.declared.name!r}; change the "
                "name in one of the YAMLs"
            )


def _patterns(route: Route) -> tuple[tuple[str, tuple[str, ...]], tuple[str, tuple[str, ...]]]:
    return ("data_sources", route.data_sources), ("abilities", route.abilities)


def _matches(value: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(value.lower(), pattern.lower()) for pattern in patterns)
