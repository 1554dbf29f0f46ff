"""The sandboxes by name, the one that picks for itself, and their settings in a YAML."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from afm.errors import ConfigError, SandboxUnavailableError, suggestion
from afm.sandbox.base import LocalSandbox, RunResult, SandboxLimits
from afm.sandbox.bubblewrap import BubblewrapSandbox
from afm.sandbox.nsjail import NsjailSandbox
from afm.sandbox.zygote import ZygoteSandbox

_LOG = logging.getLogger(__name__)
_OF_ZYGOTES = ("warm", "start_s")


class AutoSandbox:
    """A :class:`~afm.sandbox.zygote.ZygoteSandbox`, or if no zygote works a ``BubblewrapSandbox``.

    Both isolate alike. Which one it is shows at the first run; the choice then holds.

    Args:
        options: Arguments of ``ZygoteSandbox``.
    """

    def __init__(self, **options: Any) -> None:
        self._zygotes = ZygoteSandbox(**options)
        self._other = BubblewrapSandbox(**{k: v for k, v in options.items() if k not in _OF_ZYGOTES})
        self._chosen: LocalSandbox | None = None

    async def run(self, code: str, stdin: str = "", limits: SandboxLimits | None = None) -> RunResult:
        """See :class:`afm.sandbox.base.Sandbox`."""
        return await (self._chosen or await self._choose()).run(code, stdin, limits)

    async def isolation(self) -> list[str]:
        """See :class:`afm.sandbox.base.Sandbox`."""
        return await (self._chosen or await self._choose()).isolation()

    async def close(self) -> None:
        """See :class:`afm.sandbox.base.Sandbox`."""
        await self._zygotes.close()
        await self._other.close()

    async def _choose(self) -> LocalSandbox:
        try:
            await self._zygotes.isolation()
            self._chosen = self._zygotes
        except SandboxUnavailableError as error:
            await self._other.isolation()  # raises what is missing if there is no isolation at all
            if self._chosen is None:
                _LOG.warning("programs run in a bubblewrap jail each, several times slower: %s", error)
            self._chosen = self._other
        return self._chosen


BACKENDS: dict[str, Callable[..., LocalSandbox]] = {
    "auto": AutoSandbox,
    "zygote": ZygoteSandbox,
    "bubblewrap": BubblewrapSandbox,
    "nsjail": NsjailSandbox,
}


def open_sandbox(backend: str = "auto", **options: Any) -> LocalSandbox:
    """A sandbox by its backend's name.

    Nothing is started yet: the first run looks for isolation, and fails when there is none.

    Args:
        backend: ``zygote`` (warm and fast), ``bubblewrap`` or ``nsjail`` (a jail for each run), or ``auto``: the first, and
            where the kernel does not allow it the second, which is logged once.
        options: Arguments of the backend's class. ``limits`` may be a mapping of
            :class:`SandboxLimits` fields.

    Raises:
        ConfigError: Unknown backend, option or limit, or a value of the wrong kind.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"unknown sandbox backend {backend!r}, {suggestion(backend, BACKENDS)}")
    if isinstance(options.get("limits"), Mapping):
        options["limits"] = limits_from(options["limits"])
    try:
        return BACKENDS[backend](**options)
    except TypeError as error:
        raise ConfigError(f"sandbox {backend!r}: {error}") from None


def limits_from(values: Mapping[str, Any]) -> SandboxLimits:
    """Limits from a mapping, e.g. of a YAML file.

    Raises:
        ConfigError: An unknown name, or a value that is no positive number within reason.
    """
    known = [item.name for item in fields(SandboxLimits)]
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown sandbox limit {name!r}, {suggestion(str(name), known)}")
    return SandboxLimits(**values)


class SandboxSettings(BaseModel):
    """Which sandbox, and how: the arguments of :func:`afm.sandbox.open_sandbox`; unset ones keep its defaults."""

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
        """The arguments that are set."""
        return self.model_dump(exclude_none=True)
