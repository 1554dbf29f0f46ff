"""The section ``harness`` of a recipe: the program that is the agent, its judge, and the rule for its credit."""

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
    """Who judges an episode."""

    DATA_SOURCE = "data_source"
    """The scorer of the row's data source judges the program's final answer."""
    HARNESS = "harness"
    """The program scores itself, with ``score`` in its verdict file."""


class HarnessSettings(Settings):
    """A program or a team as the agent. It asks the model through the gateway."""

    command: tuple[str, ...] = ()
    """Program and arguments, started once for each episode. ``python`` is the Python that runs ``afm``. Words
    that name a file in the YAML's folder become its path."""
    preload: bool = False
    """Whether the packages that the program imports are imported once. Each episode's program is then a fork of that
    process. ``command`` must be ``python``, a script and its arguments."""
    team: Path | None = None
    """A team's YAML (``configs/distill``), in place of ``command``. The trained model answers every member."""
    reward: Judge = Judge.DATA_SOURCE
    """``data_source`` scores the final answer with the scorer of the row's data source. ``harness`` takes the
    program's own ``score``."""
    credit: Credit = Credit.ALL
    """How an episode's advantage is distributed over its trajectories: ``all``, ``last`` or ``by_turn``."""
    by_member: MemberCredit = MemberCredit.SHARED
    """Advantage of a team's member: ``shared`` (the episode's), ``own`` (of its own verdict) or ``difference``
    (compared with episodes in which its words differ)."""
    timeout_s: float = Field(default=120.0, gt=0, le=86_400)
    """Seconds after which a program is killed with every process that it started."""
    retries: int = Field(default=1, ge=0)
    """Further attempts at an episode whose program hung, crashed or never asked the model. If the last one fails
    too, the episode has no score."""
    max_requests: int | None = Field(default=None, ge=1)
    """Most requests in one attempt at an episode. Further ones get status 400. By default only ``timeout_s``
    limits them."""
    concurrency: int = Field(default=16, ge=1)
    """Number of programs at the same time in each process that runs episodes."""
    max_output_bytes: int = Field(default=1 << 20, gt=0, le=1 << 30)
    """Bytes of standard output, or of standard error, after which a program is killed."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that the program gets in addition to the usual ones, such as ``PATH``, ``HOME``
    and ``LANG``. In the sandbox it gets only these. Other variables, such as the API keys of ``afm``'s services, are
    not passed on."""
    sandbox: bool | SandboxSettings = False
    """``true`` runs the program in a bubblewrap jail that reaches only the gateway. A mapping sets the sandbox's
    keys, for example ``{python: /opt/python/bin/python3, binds: [/opt/data]}``."""

    @field_validator("command", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(f"expected a list of words, for example {value.split()}")
        return value

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.command) == (self.team is not None):
            raise ValueError("expected exactly one of `command` (a program) and `team`")
        if self.team is not None and self.sandbox:
            raise ValueError("sandbox: not supported for a team; its tools have their own sandbox")
        if self.preload and (self.sandbox or not "".join(self.command[1:2]).endswith(".py")):
            raise ValueError("preload: needs a command like [python, agent.py] that runs outside the sandbox")
        return self

    @property
    def words(self) -> tuple[str, ...]:
        """The command with the path of this Python."""
        first, *rest = self.command
        return (sys.executable if first in _PYTHON else first, *rest)


OF_THE_LOOP = ("without_tools", "unseen_tools", "keep_tokens")
"""Keys of an evaluation that only the agent's own loop supports."""


def fault_of_harness(config: Any) -> str | None:
    """Return the error for a key that an evaluation with a harness does not support, or ``None``."""
    clash = next((name for name in ("team", "agents", *OF_THE_LOOP) if getattr(config, name)), None)
    if config.tools is not None or config.protocol != "ours":
        clash = clash or ("tools" if config.tools is not None else "protocol")
    return clash and f"{clash}: not supported with a harness, whose program has its own agent and tools"


def program_finding(settings: HarnessSettings) -> Finding:
    """Check that the program and the files of its command exist, or the team's file."""
    if settings.team is not None:
        if settings.team.is_file():
            return Finding(Level.OK, "harness", f"the team of {settings.team}")
        return Finding(
            Level.ERROR, "harness", f"harness.team: {settings.team} does not exist; give a team's YAML"
        )
    first, *rest = settings.words
    if not settings.sandbox and shutil.which(first) is None:
        text = f"harness.command: program {first!r} not found; install it, or give its path"
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
    """Resolve ``harness.team`` and the files in ``harness.command`` against a YAML's folder, in place.

    Before settings are saved, the folder is that of the command line, so that the paths hold in any folder.
    """
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
