"""Settings of the code server."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from afm.configuration import read_file, validated
from afm.errors import ConfigError
from afm.sandbox import SandboxLimits, SandboxSettings, limits_from

_CEILING = {
    "wall_s": 180.0,
    "cpu_s": 180,
    "memory_bytes": 8 << 30,
    "file_bytes": 256 << 20,
    "output_bytes": 64 << 20,
    "stdin_bytes": 64 << 20,
    "processes": 64,
    "open_files": 1024,
}


class CodeServerSettings(BaseModel):
    """The YAML of a code server.

    Attributes:
        sandbox: Where programs run.
        max_limits: The most that a request may ask for, by field of :class:`SandboxLimits`.
        max_parallel: Programs at the same time; the number of cores when ``None``.
        max_waiting: Requests that may wait for one of those places; further ones get status 429.
        max_wait_s: The longest wait; then status 429.
        max_request_bytes: Size of a request.
        max_held_bytes: Size of all requests that run or wait together; further ones get status 429.
        finish_s: How long programs may go on when the server is told to stop.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sandbox: SandboxSettings = SandboxSettings()
    max_limits: dict[str, float | int] = Field(default_factory=dict)
    max_parallel: int | None = Field(default=None, ge=1)
    max_waiting: int = Field(default=256, ge=0)
    max_wait_s: float = Field(default=30.0, gt=0)
    max_request_bytes: int = Field(default=64 << 20, ge=1024)
    max_held_bytes: int = Field(default=1 << 30, ge=1024)
    finish_s: float = Field(default=10.0, gt=0)

    def parallel(self) -> int:
        """Programs at the same time."""
        return self.max_parallel or len(os.sched_getaffinity(0))

    def ceiling(self) -> SandboxLimits:
        """The most that a request may ask for.

        Raises:
            ConfigError: ``max_limits`` has an unknown name or a value that is no positive number.
        """
        return limits_from(_CEILING | self.max_limits)

    def usual(self) -> SandboxLimits:
        """The limits of a request that names none: the defaults, or the most where that is less."""
        most = self.ceiling()
        return limits_from({name: min(value, getattr(most, name)) for name, value in SandboxLimits()})


def load_server_settings(path: Path | None) -> CodeServerSettings:
    """The settings in a YAML, the defaults without one.

    Raises:
        ConfigError: Names the file, the key path, the value and what was expected.
    """
    if path is None:
        return CodeServerSettings()
    settings = validated(CodeServerSettings, read_file(path, "code server settings"), str(path))
    try:
        settings.ceiling()
    except ConfigError as error:
        raise ConfigError(f"{path}: max_limits: {error}") from None
    return settings


def excess(asked: SandboxLimits, most: SandboxLimits) -> str:
    """In words, which limit is beyond what the server allows; empty when none is."""
    for name, value in asked:
        if value > getattr(most, name):
            return f"limits.{name}: got {value:g}, this server allows at most {getattr(most, name):g} (its max_limits)"
    return ""
