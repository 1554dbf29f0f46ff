"""Everything this package registers with verl, in one place."""

from __future__ import annotations

import os
from types import ModuleType

from verl_ext import compat
from verl_ext.aggregation import put_our_metrics_together
from verl_ext.curriculum import draw_by_difficulty
from verl_ext.hooks import after_import
from verl_ext.kept_advantages import keep_advantages
from verl_ext.validation import average_scored_samples, mark_validation

CPU_ENGINE = "afm_cpu"
"""Name of our rollout engine: ``actor_rollout_ref.rollout.name=afm_cpu``."""


def register() -> None:
    """Register platform, rollout engine and patches. Called by verl's own import; may be called again."""
    compat.check_verl()
    after_import("verl.workers.rollout.base", _rollout_adapter)
    after_import("verl.workers.rollout.replica", _rollout_replica)
    after_import("verl.trainer.ppo.v1.trainer_base", compat.save_when_asked)
    after_import("verl.trainer.ppo.v1.trainer_base", compat.tell_whole_checkpoints)
    after_import("verl.trainer.ppo.v1.trainer_base", compat.watch_for_losses)
    after_import("verl.trainer.ppo.v1.trainer_base", compat.report_entropy_of_a_token)
    after_import("verl.workers.rollout.vllm_rollout.vllm_rollout", compat.report_failed_updates)
    after_import("verl.trainer.ppo.v1.utils", put_our_metrics_together)
    after_import("verl.utils.checkpoint.fsdp_checkpoint_manager", compat.load_any_world_size)
    after_import("verl.trainer.ppo.v1.trainer_base", draw_by_difficulty)
    after_import("verl.trainer.ppo.v1.trainer_base", average_scored_samples)
    after_import("verl.trainer.ppo.v1.trainer_base", keep_advantages)
    after_import("verl.experimental.agent_loop.agent_loop", mark_validation)
    if not on_cpu():
        return
    import verl_ext.platform_cpu  # noqa: F401 - registers itself with verl's PlatformRegistry

    # FSDP engines are registered for cuda and npu only; the stock class runs on CPU unchanged.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    after_import("verl.utils.distributed", compat.use_gloo_alone)
    after_import("verl.workers.engine.fsdp.transformer_impl", compat.drop_pinned_offload)
    after_import("verl.utils.model", compat.load_value_head_with_sdpa)


def on_cpu() -> bool:
    """Whether this process runs on verl's platform ``cpu``."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def _rollout_adapter(module: ModuleType) -> None:
    registry = compat.target(module, "_ROLLOUT_REGISTRY")
    registry[(CPU_ENGINE, "async")] = "verl_ext.rollout_cpu.CpuRolloutAdapter"


def _rollout_replica(module: ModuleType) -> None:
    compat.target(module, "RolloutReplicaRegistry").register(CPU_ENGINE, _load_replica)


def _load_replica() -> type:
    from verl_ext.rollout_cpu import CpuReplica

    return CpuReplica
