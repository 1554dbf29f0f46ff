"""Run a function right after some module was imported, without importing that module ourselves."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Hook = Callable[[ModuleType], None]


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
