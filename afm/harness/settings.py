"""The section ``harness`` of a recipe: which program is the agent, who judges it, and how its credit is shared."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from afm.configuration import Settings
from afm.errors import ConfigError
from afm.findings import Finding, Level
from afm.harness.credit import Credit, MemberCredit
from afm.processes import named_environment
from afm.sandbox import SandboxSettings

_PYTHON = ("python", "python3")
_SCRIPTS = (".py", ".sh", ".js", ".mjs", ".ts")


class Judge(StrEnum):
    """Who scores an episode."""

    DATA_SOURCE = "data_source"
    """Our scorer of the row's data source compares the program's final answer."""
    HARNESS = "harness"
    """The program itself, by ``score`` in its verdict file."""


class HarnessSettings(Settings):
    """A program, or a team, that is the agent: it asks the model through the gateway, as often as it likes."""

    command: tuple[str, ...] = ()
    """Program and arguments, started once for each episode. ``python`` is the Python that runs ``afm``. Words
    that name a file in the YAML's folder become its path."""
    team: Path | None = None
    """In place of ``command``: a team's YAML (``configs/distill``). The model that is trained answers every member."""
    reward: Judge = Judge.DATA_SOURCE
    """``data_source`` judges the final answer by the scorer of the row's data source. ``harness`` takes the
    program's own ``score``."""
    credit: Credit = Credit.ALL
    """How an episode's advantage is shared over its trajectories: ``all``, ``last`` or ``by_turn``."""
    by_member: MemberCredit = MemberCredit.SHARED
    """Whose advantage a team's member gets: ``shared`` (the episode's), ``own`` (of its own verdict) or
    ``difference`` (against the episodes in which it said something else)."""
    timeout_s: float = Field(default=120.0, gt=0, le=86_400)
    """Seconds for a program. Then it is killed with everything that it started."""
    retries: int = Field(default=1, ge=0)
    """Further attempts at an episode whose program hung, crashed or never asked the model. After the last one
    the episode has no score."""
    max_requests: int | None = Field(default=None, ge=1)
    """Requests of one attempt at an episode. Further ones are refused with status 400. The default is no limit but
    ``timeout_s``."""
    concurrency: int = Field(default=16, ge=1)
    """Programs at the same time in each process that runs episodes."""
    max_output_bytes: int = Field(default=1 << 20, gt=0, le=1 << 30)
    """Bytes of standard output or error after which a program is killed."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that the program gets in addition to the usual ones, such as ``PATH``, ``HOME``
    and ``LANG``; in the sandbox these alone. Other variables, with the keys of ``afm``'s own services, are not passed
    on."""
    sandbox: bool | SandboxSettings = False
    """``true`` runs the program in a bubblewrap jail that reaches the gateway and nothing else. A mapping has the
    sandbox's own keys, for example ``{python: /opt/python/bin/python3, binds: [/opt/data]}``."""

    @field_validator("command", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(f"a list of words, for example {value.split()}")
        return value

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.command) == (self.team is not None):
            raise ValueError(
                "either a program or a team is the agent; give exactly one of `command` and `team`"
            )
        if self.team is not None and self.sandbox:
            raise ValueError("sandbox: not for a team, whose tools have a sandbox of their own")
        return self

    @property
    def words(self) -> tuple[str, ...]:
        """The command with the Python of this process."""
        first, *rest = self.command
        return (sys.executable if first in _PYTHON else first, *rest)


OF_THE_LOOP = ("without_tools", "unseen_tools", "keep_tokens")
"""Keys of an evaluation that only the agent's own loop has."""


def fault_of_harness(config: Any) -> str | None:
    """What an evaluation with a harness must not say, ``None`` if all is well."""
    clash = next((name for name in ("team", "agents", *OF_THE_LOOP) if getattr(config, name)), None)
    if config.tools is not None or config.protocol != "ours":
        clash = clash or ("tools" if config.tools is not None else "protocol")
    return clash and f"{clash}: not with a harness, whose program has an agent and tools of its own"


def program_finding(settings: HarnessSettings) -> Finding:
    """Whether the program and the files that its command names are there, or the team's file."""
    if settings.team is not None:
        if settings.team.is_file():
            return Finding(Level.OK, "harness", f"the team of {settings.team}")
        return Finding(
            Level.ERROR, "harness", f"harness.team: {settings.team} does not exist; give a team's YAML"
        )
    first, *rest = settings.words
    if not settings.sandbox and shutil.which(first) is None:
        text = f"harness.command: {first!r} is no program here; install it, or give its path"
        return Finding(Level.ERROR, "harness", text)
    missing = [word for word in rest if word.endswith(_SCRIPTS) and not Path(word).is_file()]
    if missing:
        text = f"harness.command: {missing[0]} does not exist; give a path from the YAML's folder, or an absolute one"
        return Finding(Level.ERROR, "harness", text)
    try:
        named_environment(settings.environment, "harness")
    except ConfigError as error:
        return Finding(Level.ERROR, "harness", f"harness.environment: {error}")
    where = "in the sandbox" if settings.sandbox else "as a process of this user"
    return Finding(Level.OK, "harness", f"{' '.join(settings.words)}, {where}")


def anchor_harness(data: Mapping[str, Any], folder: Path) -> None:
    """Make ``harness.team``, and the words of ``harness.command`` that name a file, absolute from a YAML's folder, in place."""
    section = data.get("harness")
    if not isinstance(section, dict):
        return
    if isinstance(command := section.get("command"), list):
        section["command"] = [_anchored(word, folder) for word in command]
    if isinstance(team := section.get("team"), str):
        section["team"] = str((folder / team).resolve())


def _anchored(word: Any, folder: Path) -> Any:
    if not isinstance(word, str) or not word:
        return word
    file = folder / word
    return str(file.resolve()) if file.is_file() else word
