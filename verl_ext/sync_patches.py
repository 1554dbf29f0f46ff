"""Changes to verl 0.9.1 that prove that weights arrive (:mod:`verl_ext.weight_proof`), declared as in ``patches.py``."""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from afm.errors import EngineError
from verl_ext.patching import after_import, patch, target


@patch("verl.workers.engine_workers", "ActorRolloutRefWorker.update_weights")
def prove_sync(original: Any) -> Any:
    """End a run whose rollout engine does not have the trainer's weights after a sync.

    Symptom: an adapter was never delivered, and the run went on for two months (verl issue 7495).
    Cause: verl/workers/engine_workers.py:728 sends what another function collects, and looks at nothing that arrives.
    """

    @wraps(original)
    async def update_weights(self: Any, global_steps: int | None = None, mode: str = "auto") -> Any:
        from verl_ext.weight_proof import compare, proof_of, publish

        if (proof := proof_of(self)) is None:
            return await original(self, global_steps=global_steps, mode=mode)
        expected = proof.expect(self.actor.engine.module)
        separate = (self.config.rollout.checkpoint_engine.backend if mode == "auto" else mode) != "naive"
        if separate:
            publish(proof, expected)
        result = await original(self, global_steps=global_steps, mode=mode)
        if not separate:
            await compare(proof, expected, self.rollout, global_steps)
        return result

    return update_weights


@patch("verl.checkpoint_engine.base", "CheckpointEngineWorker.update_weights")
def prove_received_weights(original: Any) -> Any:
    """Do the same for an engine with devices of its own.

    Symptom: see :func:`prove_sync`.
    Cause: verl/checkpoint_engine/base.py:354 takes what comes, which with an adapter is the model without it.
    """

    @wraps(original)
    async def update_weights(self: Any, global_steps: int | None = None) -> None:
        from verl_ext.weight_proof import compare_received

        await original(self, global_steps=global_steps)
        await compare_received(self, global_steps)

    return update_weights


@patch("verl.checkpoint_engine.base", "CheckpointEngineManager.update_weights")
def note_sync(original: Any) -> Any:
    """Note which step's weights were sent last, for :func:`miss_no_sync`.

    Symptom: see :func:`prove_sync`.
    Cause: verl/checkpoint_engine/base.py:510 does not keep it.
    """

    @wraps(original)
    def update_weights(self: Any, global_steps: int | None = None) -> Any:
        result = original(self, global_steps=global_steps)
        if global_steps is not None:
            self.afm_synced = global_steps
        return result

    return update_weights


@patch("verl.trainer.ppo.v1.trainer_base", "PPOTrainer.on_step_begin")
def miss_no_sync(original: Any) -> Any:
    """End a run that begins a step with the weights of an earlier one.

    Symptom: see :func:`prove_sync`.
    Cause: verl/trainer/ppo/v1/trainer_base.py:665 leaves the sync to each trainer. Synchronous and colocated ones have one
    in each step; those with engines of their own have another ``on_step_begin``, and may leave steps out.
    """

    def on_step_begin(self: Any) -> None:
        original(self)
        synced = getattr(self.checkpoint_manager, "afm_synced", None)
        custom = self.config.actor_rollout_ref.rollout.get("custom") or {}
        if custom.get("weight_proof", True) and synced != self.global_steps - 1:
            raise EngineError(
                f"step {self.global_steps} begins, and the rollout engine was given the weights of step {synced}, not of "
                f"step {self.global_steps - 1}: a sync was left out (weight_proof: false turns this check off)"
            )

    return on_step_begin


@patch("verl.workers.rollout.vllm_rollout.vllm_async_server", "vLLMHttpServer.collective_rpc")
def return_replies(original: Any) -> Any:
    """Let the trainer read what vLLM's workers answer.

    Symptom: fingerprints of an engine's weights do not arrive.
    Cause: verl/workers/rollout/vllm_rollout/vllm_async_server.py:256 drops the replies.
    """

    async def collective_rpc(self: Any, method: Any, *args: Any, **options: Any) -> Any:
        return await self.engine.collective_rpc(method, *args, **options)

    return collective_rpc


def register() -> None:
    """Let vLLM's workers and verl's adapter of vLLM tell the fingerprints of their weights."""
    after_import("verl.workers.rollout.vllm_rollout.utils", _vllm_worker)
    after_import("verl.workers.rollout.vllm_rollout.vllm_rollout", _vllm_adapter)


def _vllm_worker(module: ModuleType) -> None:
    from verl_ext.vllm_weights import fingerprints_of_worker

    target(module, "vLLMColocateWorkerExtension").afm_fingerprints = fingerprints_of_worker


def _vllm_adapter(module: ModuleType) -> None:
    from verl_ext.vllm_weights import fingerprints_of_engine

    target(module, "ServerAdapter").served_fingerprints = fingerprints_of_engine
