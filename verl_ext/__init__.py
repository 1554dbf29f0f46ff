"""Plugin for verl 0.9.1: agent loop, CPU platform and rollout engine, rewards, group guard, launcher.

verl imports this package in every one of its processes when ``VERL_USE_EXTERNAL_MODULES=verl_ext`` is
set, and only then anything is registered; any other import of it does nothing.
"""

from __future__ import annotations

import os


def _loaded_by_verl() -> bool:
    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "")
    return __name__ in [name.strip() for name in modules.split(",")]


if _loaded_by_verl():
    from verl_ext.patches import register

    register()
