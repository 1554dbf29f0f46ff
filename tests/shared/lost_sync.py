"""A fault: named in VERL_USE_EXTERNAL_MODULES, it keeps trained weights from leaving the trainer."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from verl_ext.patching import after_import


def _lose(module: ModuleType) -> None:
    send = module.CpuRolloutAdapter._send

    async def _send(self: Any, bucket: Any, last: bool, global_steps: int | None, adapter: Any) -> None:
        if not global_steps:
            await send(self, bucket, last, global_steps, adapter)

    module.CpuRolloutAdapter._send = _send


after_import("verl_ext.rollout_cpu", _lose)
