"""Isolation for model-written code, by backend. No isolation, no run: there is no unsafe mode."""

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
    """A :class:`~afm.sandbox.zygote.ZygoteSandbox`, or if no zygote works a ``BubblewrapSandbox``.

    Both isolate alike. Which one it is shows at the first run; the choice then holds.
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
            await self._other.isolation()  # raises what is missing if there is no isolation at all
            if self._chosen is None:
                _LOG.warning("programs run in a bubblewrap jail each, several times slower: %s", error)
            self._chosen = self._other
        return self._chosen


_BACKENDS: dict[str, Callable[[SandboxSettings], LocalSandbox]] = {
    "auto": AutoSandbox,
    "zygote": ZygoteSandbox,
    "bubblewrap": BubblewrapSandbox,
    "nsjail": NsjailSandbox,
}


def open_sandbox(backend: str = "auto", **options: Any) -> LocalSandbox:
    """A sandbox by its backend's name, with options as in :class:`SandboxSettings`.

    Nothing is started yet: the first run looks for isolation and fails without it.

    Raises:
        ConfigError: Unknown backend, option or limit, or a value of the wrong kind.
    """
    settings = validated(SandboxSettings, {"backend": backend, **options}, "sandbox")
    return _BACKENDS[settings.backend](settings)
