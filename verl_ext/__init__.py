"""Plugin for verl 0.9.1: agent loop, CPU platform and rollout engine, rewards, group guard, launcher.

With ``VERL_USE_EXTERNAL_MODULES=verl_ext``, verl imports this package in each of its processes, and the package
registers its parts. Any other import of it registers nothing.
"""

from __future__ import annotations

import os


def _loaded_by_verl() -> bool:
    modules = os.environ.get("VERL_USE_EXTERNAL_MODULES", "")
    return __name__ in [name.strip() for name in modules.split(",")]


if _loaded_by_verl():
    from verl_ext.patches import register

    register()
