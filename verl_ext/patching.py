"""How verl is patched: one decorator, which runs right after verl imports the module that it changes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

from afm.errors import EngineError, MissingExtraError, install_advice

Hook = Callable[[ModuleType], None]
Replacement = Callable[[Any], Any]
"""Takes what verl has in a place and returns its replacement."""

VERL_VERSION = "0.9.1"
"""The only release these patches were written for and tested with."""


def check_verl() -> None:
    """Refuse any other verl.

    Raises:
        MissingExtraError: verl is not installed.
        EngineError: Another version is installed.
    """
    try:
        installed = version("verl")
    except PackageNotFoundError:
        raise MissingExtraError("verl", "rl") from None
    if installed != VERL_VERSION:
        raise EngineError(
            f"verl {installed} is installed; verl_ext patches and tests verl {VERL_VERSION} only. "
            f"For that one, {install_advice('rl')}"
        )


def target(module: Any, name: str) -> Any:
    """The attribute a patch is about to use.

    Raises:
        EngineError: It does not exist, so the patch would silently do nothing.
    """
    if not hasattr(module, name):
        raise EngineError(
            f"{module.__name__} has no {name}: this verl differs from release {VERL_VERSION}; "
            f"to reinstall it, {install_advice('rl')}"
        )
    return getattr(module, name)


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute of verl that we replace.

    Attributes:
        module: Where verl has it.
        attribute: Its name there, ``Class.method`` for a method.
        replacement: Makes the new one out of verl's; its docstring says symptom, cause and the line in verl.
        cpu_only: Only runs without an accelerator need it.
    """

    module: str
    attribute: str
    replacement: Replacement
    cpu_only: bool = False

    def apply(self, module: ModuleType) -> None:
        """Replace the attribute of the imported ``module``; a second call changes nothing.

        Raises:
            EngineError: Another release of verl is installed, or it has no such attribute.
        """
        check_verl()
        owner: Any = module
        *classes, name = self.attribute.split(".")
        for part in classes:
            owner = target(owner, part)
        original = target(owner, name)
        if getattr(original, "patched_by_afm", False):
            return
        replaced = self.replacement(original)
        replaced.patched_by_afm = True
        setattr(owner, name, replaced)

    def install(self) -> None:
        """Apply the patch as soon as its module is imported."""
        after_import(self.module, self.apply)


PATCHES: list[Patch] = []
"""Every patch, in the order in which :mod:`verl_ext.patches` declares them."""


def patch(module: str, attribute: str, *, cpu_only: bool = False) -> Callable[[Replacement], Patch]:
    """Declare a patch of ``module.attribute``; see :class:`Patch`."""

    def declare(replacement: Replacement) -> Patch:
        PATCHES.append(Patch(module, attribute, replacement, cpu_only))
        return PATCHES[-1]

    return declare


class _AfterImport(MetaPathFinder):
    """Finds nothing itself: it lets the real finders find, and wraps what they found."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Taken out first: the search below comes through here again.
        hooks = self.hooks.pop(fullname, None)
        if hooks is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for hook in hooks:
                hook(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_FINDER = _AfterImport()


def after_import(name: str, hook: Hook) -> None:
    """Call ``hook(module)`` once module ``name`` has been executed; at once if it already was.

    Asking twice for the same hook runs it once.
    """
    if name in sys.modules:
        hook(sys.modules[name])
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    waiting = _FINDER.hooks.setdefault(name, [])
    if hook not in waiting:
        waiting.append(hook)
