"""Patches of verl 0.9.1, one function each.

Every function takes the module it changes, may be called again without effect, and fails loudly when
what it replaces is gone. Line numbers are those of the release named in :data:`VERL_VERSION`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from afm.errors import EngineError, MissingExtraError, install_advice
from verl_ext.checkpoints import begin_checkpoint, stored_world_size

Patch = Callable[[ModuleType], None]

VERL_VERSION = "0.9.1"
"""The only release these patches were written for and tested with."""


def check_verl() -> None:
    """Refuse any other verl.

    Raises:
        MissingExtraError: verl is not installed.
        EngineError: Another version is installed.
    """
    try:
        found = version("verl")
    except PackageNotFoundError:
        raise MissingExtraError("verl", "rl") from None
    if found != VERL_VERSION:
        raise EngineError(
            f"verl {found} is installed; verl_ext patches and tests verl {VERL_VERSION} only. "
            f"For that one, {install_advice('rl')}"
        )


def target(module: ModuleType, name: str) -> Any:
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


def use_gloo_alone(module: ModuleType) -> None:
    """Let the process group of a CPU worker start.

    Symptom: ``init_process_group`` rejects the backend string ``cpu:gloo,cpu:gloo``.
    Cause: verl/utils/distributed.py:89 joins a CPU part and a device part, which are the same here.
    """
    original = target(module, "initialize_global_process_group_ray")
    if getattr(original, "patched_by_afm", False):
        return

    def initialize_global_process_group_ray(
        timeout_second: float | None = None, backend: str | None = None
    ) -> None:
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    initialize_global_process_group_ray.patched_by_afm = True  # type: ignore[attr-defined]
    module.initialize_global_process_group_ray = initialize_global_process_group_ray  # type: ignore[attr-defined]


def drop_pinned_offload(module: ModuleType) -> None:
    """Let a forward-only (reference) model load on a CPU.

    Symptom: ``Cannot access accelerator device when none is available`` while the reference model loads.
    Cause: verl/workers/engine/fsdp/transformer_impl.py:462 offloads it to pinned memory, which needs an
    accelerator. On a CPU there is nothing to offload from.
    """
    original = target(module, "CPUOffloadPolicy")
    if getattr(original, "patched_by_afm", False):
        return

    def no_offload(pin_memory: bool = True) -> None:
        """Stand in for ``CPUOffloadPolicy``: no policy at all."""

    no_offload.patched_by_afm = True  # type: ignore[attr-defined]
    module.CPUOffloadPolicy = no_offload  # type: ignore[attr-defined]


def load_value_head_with_sdpa(module: ModuleType) -> None:
    """Let PPO's critic load without flash attention.

    Symptom: ``FlashAttention2 has been toggled on, but it cannot be used``.
    Cause: verl/utils/model.py:649 names the attention implementation instead of asking the model's config.
    """
    original = target(module, "load_valuehead_model")
    if getattr(original, "patched_by_afm", False):
        return

    def load_valuehead_model(
        local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool
    ) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
        )

    load_valuehead_model.patched_by_afm = True  # type: ignore[attr-defined]
    module.load_valuehead_model = load_valuehead_model  # type: ignore[attr-defined]


CHECKPOINT_REQUEST = "checkpoint_now"
"""A file of this name in a run's output folder: a checkpoint is saved at the end of the step under way."""


def save_when_asked(module: ModuleType) -> None:
    """Let somebody ask for a checkpoint between two that ``trainer.save_freq`` plans.

    Cause: verl/trainer/ppo/v1/trainer_base.py:481 saves by the step's number alone. Done where profiling ends, right before
    that line: the hook ``on_step_end`` comes after the rollout engine has taken the memory back.
    """
    trainer = target(module, "PPOTrainer")
    original = trainer._stop_profiling
    if getattr(original, "patched_by_afm", False):
        return

    def _stop_profiling(self: Any) -> None:
        original(self)
        request = Path(self.config.trainer.default_local_dir).parent / CHECKPOINT_REQUEST
        if not request.exists():
            return
        every = self.config.trainer.save_freq
        if every <= 0 or self.global_steps % every:
            self._save_checkpoint()
        request.unlink(missing_ok=True)

    _stop_profiling.patched_by_afm = True  # type: ignore[attr-defined]
    trainer._stop_profiling = _stop_profiling


def tell_whole_checkpoints(module: ModuleType) -> None:
    """Let a checkpoint of an asynchronous trainer count as whole only with its queue of samples.

    Symptom: a run that was killed while it saved was resumed without the questions that were under way.
    Cause: verl/trainer/ppo/v1/trainer_base.py:1005 saves the queue after everything else, nothing in the folder says that
    one belongs there, and line 904 loads a checkpoint without it in silence.
    """
    trainer = target(module, "PPOTrainer")
    original = trainer._save_checkpoint
    if getattr(original, "patched_by_afm", False):
        return

    def _save_checkpoint(self: Any) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        begin_checkpoint(folder, asynchronous=self.trainer_mode != "sync")
        original(self)

    _save_checkpoint.patched_by_afm = True  # type: ignore[attr-defined]
    trainer._save_checkpoint = _save_checkpoint


def report_entropy_of_a_token(module: ModuleType) -> None:
    """Let ``actor/entropy`` be the mean entropy of a trained token, in nats, whatever the loss is.

    Symptom: with ``seq-mean-token-sum`` it grew with the responses' length, and our alarm of a collapse looked at lengths.
    Cause: verl/trainer/ppo/v1/trainer_base.py:1677 puts it together as the loss is (``loss_agg_mode``): the one use of
    ``agg_loss`` there, so that no loss changes.
    """
    original = target(module, "agg_loss")
    if getattr(original, "patched_by_afm", False):
        return

    def agg_loss(loss_mat: Any, loss_mask: Any, **given: Any) -> Any:
        return original(loss_mat=loss_mat, loss_mask=loss_mask, loss_agg_mode="token-mean")

    agg_loss.patched_by_afm = True  # type: ignore[attr-defined]
    module.agg_loss = agg_loss  # type: ignore[attr-defined]


def load_any_world_size(module: ModuleType) -> None:
    """Let a run go on with another number of training workers.

    Symptom: ``FileNotFoundError: .../model_world_size_2_rank_0.pt``.
    Cause: verl/utils/checkpoint/fsdp_checkpoint_manager.py:216 names the files by the present number of workers. With the
    number that wrote the checkpoint verl's own code loads it.
    """
    manager = target(module, "FSDPCheckpointManager")
    original = manager.load_checkpoint
    if getattr(original, "patched_by_afm", False):
        return

    def load_checkpoint(
        self: Any, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        from verl_ext.shards import load_resharded

        stored = None if local_path is None else stored_world_size(Path(local_path))
        if local_path is None or stored in (None, self.world_size):
            original(self, local_path, hdfs_path, del_local_after_load)
            return
        load_resharded(self, Path(local_path))
        if self.rank == 0:
            print(f"{local_path}: written by {stored} workers, read by {self.world_size}", flush=True)

    load_checkpoint.patched_by_afm = True  # type: ignore[attr-defined]
    manager.load_checkpoint = load_checkpoint


def report_failed_updates(module: ModuleType) -> None:
    """Let a run end when a vLLM worker fails while it takes over new weights.

    Symptom: the training waits for ever, without a word.
    Cause: verl/workers/rollout/vllm_rollout/vllm_rollout.py:229 starts the worker's part and looks at its reply only after all
    weights were sent; before that, bucketed_weight_transfer.py waits in ``socket.recv()`` for a worker that is gone.
    """
    adapter = target(module, "ServerAdapter")
    original = adapter._execute_method
    if getattr(original, "patched_by_afm", False):
        return

    async def _execute_method(self: Any, method: str, *args: Any, **given: Any) -> Any:
        from verl_ext.ray_watch import report_if_it_fails

        reply = await original(self, method, *args, **given)
        if hasattr(reply, "future"):  # not awaited
            report_if_it_fails(reply, f"in {method}")
        return reply

    _execute_method.patched_by_afm = True  # type: ignore[attr-defined]
    adapter._execute_method = _execute_method


def watch_for_losses(module: ModuleType) -> None:
    """Let a run that lost a worker or a node, or that is granted no resources, end and say so.

    Symptom: the trainer waits for ever, or ends with an error about something else.
    Cause: verl/trainer/ppo/v1/agent_loop_tq.py starts episodes without waiting for them, so nobody hears of the death of
    the process that runs them; verl/single_controller/ray/base.py:160 waits for resources without a limit.
    """
    trainer = target(module, "PPOTrainer")
    init, fit = trainer.init, trainer.fit
    if getattr(init, "patched_by_afm", False):
        return

    def watched_init(self: Any) -> None:
        from verl_ext.ray_watch import watch

        self.afm_watch = watch(self.config)
        with self.afm_watch.explaining():
            init(self)

    def watched_fit(self: Any, agent_loop_manager: Any) -> None:
        with self.afm_watch.explaining():
            fit(self, agent_loop_manager)
        self.afm_watch.stop()

    watched_init.patched_by_afm = True  # type: ignore[attr-defined]
    trainer.init, trainer.fit = watched_init, watched_fit
