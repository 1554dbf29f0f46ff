"""The user's own teams, and a team as the player of an evaluation.

Each episode of an evaluation is an attempt in the event log, which is merged into one record.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from pydantic import Field

from afm.agents import AgentSpec, load_agent
from afm.configuration import Settings, apply_overrides, read_extended, validated
from afm.datasets import Task
from afm.distill.event_log import (
    ESTIMATED,
    PART,
    TOKENS,
    Event,
    EventKind,
    EventLog,
    Recorder,
    ended_attempts,
    read_at,
)
from afm.distill.merge import RoleMap, merge_attempt
from afm.distill.model_team.members import NoUsableReplyError
from afm.distill.model_team.settings import anchored
from afm.distill.model_team.team import ModelTeam, load_team
from afm.distill.program_team import ProgramTeam, ProgramTeamSettings
from afm.distill.run import TeamWithRoles
from afm.distill.team_policy import TrainedTeam
from afm.errors import (
    AfmError,
    ConfigError,
    EngineError,
    OwnCodeError,
    RefusedError,
    SandboxUnavailableError,
    ToolError,
)
from afm.harness.settings import anchor_harness
from afm.plugins import awaiting_all, import_class, own_code_error
from afm.tools import Tool
from afm.trajectory.record import SEALING_KEY, Record, StopReason


class OwnTeamSettings(Settings):
    """The file of a team that the user wrote in Python."""

    class_name: str
    """``module.Class``, with the module next to the file. The class takes ``seed`` and has ``async solve(recorder)``."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Additional arguments of the class."""
    agent: str
    """The agent whose trajectories the team's work becomes: the name of a shipped agent, or a YAML."""
    tools: Path
    """Tools YAML, relative to the file."""
    roles: RoleMap
    """The role of the agent that each member plays."""


class Solver(Protocol):
    """The interface of the user's class."""

    async def solve(self, recorder: Recorder) -> None:
        """Work on ``recorder.task``: ``say``, ``use`` a tool, and then ``finish``, ``fail`` or ``decline``."""
        ...


class OwnTeam:
    """A user's :class:`Solver` with the name, agent and roles of its file.

    Attributes:
        name: The class with a digest of its source, so that a changed team cannot resume an earlier run.
        source: The files of that digest.
    """

    def __init__(self, settings: OwnTeamSettings, spec: AgentSpec, file: Path, seed: int) -> None:
        where = f"{file}: class_name"
        kind = import_class(settings.class_name, file.parent, where, ("solve",), "async solve(recorder)")
        try:
            self._solver = cast("Solver", kind(seed=seed, **settings.config))
        except TypeError as error:
            raise ConfigError(f"{where}: {settings.class_name!r} cannot be made: {error}") from None
        module = sys.modules[settings.class_name.rpartition(".")[0]]
        source = Path(module.__file__ or file).read_bytes() + repr(settings.config).encode()
        self.source = str(module.__file__ or file) + (
            f" or the `config` in {file}" if settings.config else ""
        )
        self.name = f"{settings.class_name}-{hashlib.sha256(source).hexdigest()[:8]}"
        self.settings, self.spec, self.roles = settings, spec, settings.roles

    async def solve(self, recorder: Recorder) -> None:
        """Let the user's class work."""
        what = f"the team {self.settings.class_name!r}, at task {recorder.task.id!r},"
        forgotten: list[str] = []
        try:
            await awaiting_all(self._solver.solve(recorder), forgotten)
        except Exception as error:
            if not forgotten and isinstance(error, AfmError) and not isinstance(error, ConfigError):
                raise
            if not forgotten:
                then = (
                    "correct the file, delete the --output-dir or choose another, and run the command again"
                )
                raise own_code_error(error, what, then) from error
        if forgotten:
            raise OwnCodeError(f"{what} failed: {forgotten[0]}; write it before the call and start again")

    async def close(self) -> None:
        """Do nothing, because nothing is open."""


def open_team(
    path: str | Path, spec: AgentSpec | None = None, overrides: Sequence[str] = (), seed: int = 0
) -> ModelTeam | OwnTeam | ProgramTeam | TrainedTeam:
    """Open the team of a YAML.

    With ``class_name`` it is the user's own team, with ``harness`` a program or a trained team, otherwise a team of models.

    Args:
        spec: The agent whose trajectories the team's work becomes. The default is the file's ``agent``.

    Raises:
        ConfigError: Names file, key path, value and what was expected.
        UsageError: An override is wrong.
    """
    file = Path(path)
    data = read_extended(file, "a team", anchor=_anchored)
    if "harness" in data:
        apply_overrides(data, overrides)
        program = validated(ProgramTeamSettings, data, str(file), overrides=overrides)
        kind = ProgramTeam if program.harness.team is None else TrainedTeam
        return kind(program, spec or load_agent(program.agent), seed)
    if "class_name" not in data:
        return load_team(file, spec, overrides)
    apply_overrides(data, overrides)
    settings = validated(OwnTeamSettings, data, str(file), overrides=overrides)
    return OwnTeam(settings, spec or load_agent(settings.agent), file, seed)


def _anchored(data: dict[str, Any], folder: Path) -> None:
    anchored(data, folder)
    anchor_harness(data, folder)


class TeamPlayer:
    """Plays tasks with a team and its tools. Use it as a context manager.

    Every action of the members goes into an event log at once. After a kill, an answer in the log that was not judged
    yet is judged without asking the team again.

    Args:
        log: File of the events of this run only.
        priced: Whether every model of the team has a price, so that its events hold the cost of an episode.

    Raises:
        ConfigError: Another process writes the same log, or the team plays a role that the agent lacks.
    """

    keeps_format = False

    def __init__(
        self,
        team: TeamWithRoles,
        spec: AgentSpec,
        tools: Mapping[str, Tool],
        log: Path,
        *,
        priced: bool = False,
    ) -> None:
        self._team, self._spec, self._tools = team, spec, tools
        self._roles = team.roles.checked(spec)
        self._priced = priced
        self._log = EventLog(log)
        self._answered: dict[str, array[int]] = {}
        """Byte offsets of the events of each answered attempt."""

    def __enter__(self) -> TeamPlayer:
        self._log.__enter__()
        self._answered = {
            first.task_id: places
            for first, last, places in ended_attempts(self._log.path)
            if last.kind is EventKind.FINAL and last.content
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._log.__exit__()

    @property
    def name(self) -> str:
        """The name of the team."""
        return self._team.name

    async def play(self, episode: str, task: Task, seed: int) -> Record:
        """Play one episode. The record has no answer if the team gave up.

        Args:
            episode: Id of the record and of its attempts in the log.
            seed: Written into the record. It does not seed the team.

        Raises:
            EngineError, ToolError: A model or a tool failed permanently. The attempt is in the log.
            RefusedError: The team cannot read the task, or the task brings its own chat.
            BudgetSpentError: The team's budget is spent.
        """
        places = self._answered.pop(episode, None)
        if places:
            with self._log.path.open("rb") as file:
                events: Sequence[Event] = list(read_at(file, places))
        else:
            events = await self._attempt(episode, task)
        record = merge_attempt(events, self._spec, self._roles, team=self.name, seed=seed)
        given_up = record.stop is StopReason.ERROR
        return record.model_copy(
            update={
                "question": task.question,
                "ground_truth": task.ground_truth,
                "stop": StopReason.END_OF_TEXT if given_up else record.stop,
                "cost": record.cost.model_copy(update={"model_usd": self._usd(events)}),
                "provenance": {"team": _work(events), "attempt": events[0].attempt},
                "kept": True,
            }
        )

    async def _attempt(self, episode: str, task: Task) -> Sequence[Event]:
        own = task.model_copy(update={"id": episode})
        recorder = self._log.begin(own, 0, self._tools, hidden=SEALING_KEY in task.extra_info)
        try:
            await self._team.solve(recorder)
        except SandboxUnavailableError:
            raise
        except NoUsableReplyError as error:
            recorder.fail(str(error))  # the servers work, but the team cannot solve the task
        except (ToolError, EngineError) as error:
            recorder.fail(f"{type(error).__name__}: {error}")
            raise
        if not recorder.ended:
            recorder.fail("the team ended without an answer")
        if recorder.declined:
            raise RefusedError(recorder.events[-1].content)
        return recorder.events

    def _usd(self, events: Sequence[Event]) -> float | None:
        return sum(event.cost_usd for event in events) if self._priced else None


def _work(events: Sequence[Event]) -> dict[str, Any]:
    """Return the messages of the members in order, and the usage of each member's model."""
    said = [
        {"member": event.agent, "text": event.content}
        | ({"part": event.meta[PART]} if PART in event.meta else {})
        for event in events
        if event.kind in (EventKind.MESSAGE, EventKind.FINAL)
    ]
    members: dict[str, Counter[str]] = defaultdict(Counter)
    for event in events:
        if event.kind is EventKind.CALL:
            members[event.agent].update(_usage(event))
    return {"messages": said, "members": {name: dict(usage) for name, usage in members.items()}}


def _usage(event: Event) -> dict[str, float]:
    """Return the usage of one request to a model. Estimated tokens are left out and counted as unmetered."""
    usage: dict[str, float] = {"requests": 1, "seconds": event.seconds}
    if not event.ok:
        usage["failed"] = 1
    if event.meta.get(TOKENS) == ESTIMATED:
        return usage | {"unmetered": 1}
    return usage | {
        "prompt_tokens": event.prompt_tokens,
        "completion_tokens": event.completion_tokens,
        "usd": event.cost_usd,
    }
