"""The sandbox that is right here: zygotes where the kernel allows them, else a jail for each run."""

from __future__ import annotations

import logging
from typing import Any

from afm.errors import SandboxUnavailableError
from afm.sandbox.base import LocalSandbox, RunResult, SandboxLimits
from afm.sandbox.bubblewrap import BubblewrapSandbox
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
