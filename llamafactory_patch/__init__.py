"""Loss only on what the agent wrote, for stock LLaMA-Factory: an external package, no fork.

``llamafactory-patch-cli train CONFIG.yaml`` takes every option of ``llamafactory-cli`` and three more:
``ignore_observation``, ``ignore_observation_token`` and ``observation_boundary``. In Python, call
:func:`install` before LLaMA-Factory is used, or :func:`run_sft` to run a whole training as a child process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamafactory_patch.launcher import run_sft
    from llamafactory_patch.plugin import install

__all__ = ["install", "run_sft"]


def __getattr__(name: str) -> object:
    if name == "install":
        from llamafactory_patch.plugin import install

        return install
    if name == "run_sft":
        from llamafactory_patch.launcher import run_sft

        return run_sft
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
