"""Teams of a user's own: a Python class next to a YAML that gives each member a role of the agent."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from pydantic import Field

from afm.agents import AgentSpec, load_agent
from afm.configuration import Settings, apply_overrides, read_extended, validated
from afm.distill.event_log import Recorder
from afm.distill.merge import RoleMap
from afm.distill.model_team.settings import anchored
from afm.distill.model_team.team import ModelTeam, load_team
from afm.errors import AfmError, ConfigError
from afm.plugins import import_module_of, own_code_error


class OwnTeamSettings(Settings):
    """The file of a team that a user wrote in Python."""

    class_name: str
    """``module.Class``; the module is next to the file. The class is made with ``seed`` and has ``async solve(recorder)``."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the class."""
    agent: str
    """Whose trajectories the team's work becomes: a shipped agent's name or a YAML."""
    tools: Path
    """Tools YAML, relative to the file."""
    roles: RoleMap
    """Which role of the agent each member plays."""


class Solver(Protocol):
    """What the user writes."""

    async def solve(self, recorder: Recorder) -> None:
        """Work on ``recorder.task``: ``say``, ``use`` a tool, then ``finish``, ``fail`` or ``decline``."""
        ...


class OwnTeam:
    """A user's :class:`Solver` with the name, agent and roles of its file.

    Attributes:
        name: The class and a digest of its source, so that a changed team does not continue an earlier run.
    """

    def __init__(self, settings: OwnTeamSettings, spec: AgentSpec, file: Path, seed: int) -> None:
        where = f"{file}: class_name"
        module = import_module_of(settings.class_name, file.parent, where)
        kind: Any = getattr(module, settings.class_name.rpartition(".")[2], None)
        if not inspect.iscoroutinefunction(getattr(kind, "solve", None)):
            raise ConfigError(
                f"{where}: {settings.class_name!r}: expected a class with async solve(recorder)"
            )
        try:
            self._solver = cast("Solver", kind(seed=seed, **settings.config))
        except TypeError as error:
            raise ConfigError(f"{where}: {settings.class_name!r} cannot be made: {error}") from None
        source = Path(module.__file__ or file).read_bytes() + repr(settings.config).encode()
        self.name = f"{settings.class_name}-{hashlib.sha256(source).hexdigest()[:8]}"
        self.settings, self.spec, self.roles = settings, spec, settings.roles

    async def solve(self, recorder: Recorder) -> None:
        """Let the user's class work."""
        try:
            await self._solver.solve(recorder)
        except AfmError:
            raise
        except Exception as error:
            what = f"the team {self.settings.class_name!r}, at task {recorder.task.id!r},"
            raise own_code_error(error, what) from error

    async def close(self) -> None:
        """Nothing is held."""


def open_team(
    path: str | Path, spec: AgentSpec | None = None, overrides: Sequence[str] = (), seed: int = 0
) -> ModelTeam | OwnTeam:
    """The team of a YAML: the user's own where it has ``class_name``, else one of models.

    Args:
        spec: Whose trajectories its work becomes; by default the file's ``agent``.

    Raises:
        ConfigError: Names file, key path, value and what was expected.
        UsageError: An override is wrong.
    """
    file = Path(path)
    data = read_extended(file, "a team", anchor=anchored)
    if "class_name" not in data:
        return load_team(file, spec, overrides)
    apply_overrides(data, overrides)
    settings = validated(OwnTeamSettings, data, str(file), overrides=overrides)
    return OwnTeam(settings, spec or load_agent(settings.agent), file, seed)
