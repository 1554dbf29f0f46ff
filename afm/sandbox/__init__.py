"""Isolation for model-written code, with a choice of backends. Without isolation nothing runs: there is no unsafe mode."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from afm.configuration import validated
from afm.errors import SandboxUnavailableError
from afm.sandbox.base import (
    ExitReason,
    LocalSandbox,
    NamelessInput,
    RunResult,
    Sandbox,
    SandboxLimits,
    SandboxSettings,
    limits_from,
)
from afm.sandbox.jails import BubblewrapSandbox, NsjailSandbox
from afm.sandbox.zygote import ZygoteSandbox

__all__ = [
    "AutoSandbox",
    "ExitReason",
    "NamelessInput",
    "RunResult",
    "Sandbox",
    "SandboxLimits",
    "SandboxSettings",
    "limits_from",
    "open_sandbox",
]

_LOG = logging.getLogger(__name__)


class AutoSandbox:
    """A :class:`~afm.sandbox.zygote.ZygoteSandbox`, or a ``BubblewrapSandbox`` where zygotes do not work.

    Both isolate equally well. The first run makes the choice, which then stays.
    """

    def __init__(self, settings: SandboxSettings) -> None:
        self._zygotes = ZygoteSandbox(settings)
        self._other = BubblewrapSandbox(settings)
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
            await self._other.isolation()  # if nothing isolates here, its error names what is missing
            if self._chosen is None:
                _LOG.warning("each program runs in its own bubblewrap jail, several times slower: %s", error)
            self._chosen = self._other
        return self._chosen


_BACKENDS: dict[str, Callable[[SandboxSettings], LocalSandbox]] = {
    "auto": AutoSandbox,
    "zygote": ZygoteSandbox,
    "bubblewrap": BubblewrapSandbox,
    "nsjail": NsjailSandbox,
}


def open_sandbox(backend: str = "auto", **options: Any) -> LocalSandbox:
    """Return a sandbox by the name of its backend, with the options of :class:`SandboxSettings`.

    This starts nothing. The first run looks for isolation and fails without it.

    Raises:
        ConfigError: A backend, option or limit is unknown, or a value is invalid.
    """
    settings = validated(SandboxSettings, {"backend": backend, **options}, "sandbox")
    return _BACKENDS[settings.backend](settings)
