"""The settings of a sandbox in a YAML."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class SandboxSettings(BaseModel):
    """Which sandbox, and how: the arguments of :func:`afm.sandbox.open_sandbox`; its defaults where not given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str = "auto"
    python: str | None = None
    max_parallel: int | None = Field(default=None, ge=1)
    max_waiting: int | None = Field(default=None, ge=0)
    binds: tuple[str, ...] | None = None
    packages: tuple[str, ...] | None = None
    warm: tuple[tuple[str, ...], ...] | None = None
    start_s: float | None = Field(default=None, gt=0, le=600)
    nsjail_path: str | None = None

    def options(self) -> dict[str, Any]:
        """Everything that is given."""
        return self.model_dump(exclude_none=True)
