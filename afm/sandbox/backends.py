"""The sandboxes by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from afm.errors import ConfigError, suggestion
from afm.sandbox.auto import AutoSandbox
from afm.sandbox.base import LocalSandbox, SandboxLimits
from afm.sandbox.bubblewrap import BubblewrapSandbox
from afm.sandbox.nsjail import NsjailSandbox
from afm.sandbox.zygote import ZygoteSandbox

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
        ConfigError: Unknown backend, option or limit, or a value that is none.
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
