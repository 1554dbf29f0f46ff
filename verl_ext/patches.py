"""Our changes to verl 0.9.1, one function per patch, and the registration of our parts.

A patch is the last resort, after subclasses and registries. Its docstring names the symptom, the cause and the line in
verl that makes it necessary, of the release in :data:`verl_ext.patching.VERL_VERSION`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_ext import sync_patches
from verl_ext.algorithms import CPU_ENGINE, CREDIT
from verl_ext.checkpoints import CHECKPOINT_REQUEST, begin_checkpoint, stored_world_size
from verl_ext.curriculum import start_curriculum
from verl_ext.group_guard import SAMPLER, spread, without_advantage
from verl_ext.kept_episodes import keep_advantages
from verl_ext.metrics import AGENT_TOKENS, UNUSED_SHARE, aggregation_of, validation, validation_means
from verl_ext.patching import PATCHES, after_import, check_verl, patch, target
from verl_ext.teacher import REVERSE_KL, placeholder_estimator, write_reverse_kl
from verl_ext.training_sample import share_advantages

_TRAINER = "verl.trainer.ppo.v1.trainer_base"


@patch("verl.utils.distributed", "initialize_global_process_group_ray", cpu_only=True)
def use_gloo_alone(original: Any) -> Any:
    """Let the process group of a CPU worker start.

    Symptom: ``init_process_group`` rejects the backend string ``cpu:gloo,cpu:gloo``.
    Cause: verl/utils/distributed.py:89 joins a CPU part and a device part, which are equal on a CPU.
    """

    def initialize_global_process_group_ray(
        timeout_second: float | None = None, backend: str | None = None
    ) -> None:
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    return initialize_global_process_group_ray


@patch("verl.workers.engine.fsdp.transformer_impl", "CPUOffloadPolicy", cpu_only=True)
def drop_pinned_offload(original: Any) -> Any:
    """Let a forward-only (reference) model load on a CPU.

    Symptom: ``Cannot access accelerator device when none is available`` while the reference model loads.
    Cause: verl/workers/engine/fsdp/transformer_impl.py:462 offloads the model to pinned memory, which needs an
    accelerator. A CPU has no device memory to offload.
    """

    def no_offload(pin_memory: bool = True) -> None:
        """Replace ``CPUOffloadPolicy`` with no policy."""

    return no_offload


@patch("verl.workers.engine.fsdp.transformer_impl", "FSDPEngine.forward_backward_batch", cpu_only=True)
def train_like_lengths_together(original: Any) -> Any:
    """Train rows of about the same length in one micro batch.

    Symptom: an update on a CPU computes padding (a quarter of the tokens, for rows of 130 to 190).
    Cause: verl/workers/engine/utils.py:128 cuts micro batches in the order of the rows. Gradients add up to the same,
    except with ``clip_cov``, ``kl_cov``, and ``seq-mean-token-sum-norm`` without ``loss_scale_factor``.
    """

    @wraps(original)
    def forward_backward_batch(self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        from verl.utils import tensordict_utils as fields

        in_row_order = forward_only or fields.get_non_tensor_data(data, "return_model_output", default=False)
        if not in_row_order and not fields.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
            lengths = data["input_ids"].offsets().diff()
            data = fields.index_select_tensor_dict(data, lengths.argsort(stable=True))
        return original(self, data, loss_function, forward_only=forward_only)

    return forward_backward_batch


@patch("verl.utils.model", "load_valuehead_model", cpu_only=True)
def load_value_head_with_sdpa(original: Any) -> Any:
    """Let PPO's critic load without flash attention.

    Symptom: ``FlashAttention2 has been toggled on, but it cannot be used``.
    Cause: verl/utils/model.py:649 hard-codes the attention implementation instead of reading the model's config.
    """

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

    return load_valuehead_model


@patch(_TRAINER, "PPOTrainer.step")
def save_when_asked(original: Any) -> Any:
    """Let the user or an alarm request a checkpoint between those that ``trainer.save_freq`` plans.

    Symptom: an alarm that stops a run would lose all steps since the last planned checkpoint.
    Cause: verl/trainer/ppo/v1/trainer_base.py:481 decides by the step's number only. The patch saves before that line,
    because ``on_step_end`` runs after the rollout engine has taken its memory back.
    """

    def step(self: Any, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        batch = original(self, metrics, timing_raw)
        self.afm_metrics = metrics | {f"timing_s/{name}": seconds for name, seconds in timing_raw.items()}
        request = Path(self.config.trainer.default_local_dir).parent / CHECKPOINT_REQUEST
        if request.exists():
            if (every := self.config.trainer.save_freq) <= 0 or self.global_steps % every:
                self._save_checkpoint()
            request.unlink(missing_ok=True)
        return batch

    return step


@patch(_TRAINER, "PPOTrainer._save_checkpoint")
def tell_whole_checkpoints(original: Any) -> Any:
    """Let a checkpoint show whether it is complete, and hold the metrics of its step.

    Symptom: a run resumed without its unfinished questions after a kill in a save, and without a step's metrics after it.
    Cause: verl/trainer/ppo/v1/trainer_base.py:1005 saves an asynchronous trainer's queue last, no file in the folder shows
    that a queue belongs there, and line 904 silently loads a checkpoint without it. Line 514 logs a step last.
    """

    def _save_checkpoint(self: Any) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        begin_checkpoint(folder, self.afm_metrics, asynchronous=self.trainer_mode != "sync")
        original(self)

    return _save_checkpoint


@patch(_TRAINER, "agg_loss")
def report_entropy_of_a_token(original: Any) -> Any:
    """Report ``actor/entropy`` as the mean entropy of a trained token, in nats, with any loss.

    Symptom: with ``seq-mean-token-sum`` it grew with the length of responses, and so misled the alarm ``entropy_collapse``.
    Cause: verl/trainer/ppo/v1/trainer_base.py:1677 aggregates it as the loss (``loss_agg_mode``). That module uses
    ``agg_loss`` only there, so the patch changes no loss.
    """

    def agg_loss(loss_mat: Any, loss_mask: Any, **options: Any) -> Any:
        return original(loss_mat=loss_mat, loss_mask=loss_mask, loss_agg_mode="token-mean")

    return agg_loss


@patch(_TRAINER, "PPOTrainer._balance_batch")
def spread_padding(original: Any) -> Any:
    """Spread the rows that fill a batch evenly over its mini batches.

    Symptom: the last mini batches of a step had few rows to train on, each with the weight of many, or none and a loss of NaN.
    Cause: verl/trainer/ppo/padding_utils.py:210 appends the rows, and trainer_base.py:1627 keeps their order.
    """

    @wraps(original)
    def _balance_batch(self: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
        balanced = original(self, batch, *arguments, **options)
        workers = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        balanced.reorder(spread([bool(tag.get("is_padding")) for tag in balanced.tags], workers))
        return balanced

    return _balance_batch


@patch("verl.utils.checkpoint.fsdp_checkpoint_manager", "FSDPCheckpointManager.load_checkpoint")
def load_any_world_size(original: Any) -> Any:
    """Let a run continue with another number of training workers.

    Symptom: ``FileNotFoundError: .../model_world_size_2_rank_0.pt``.
    Cause: verl/utils/checkpoint/fsdp_checkpoint_manager.py:216 names the files by the current number of workers. If the
    number has not changed, verl's own code loads the checkpoint.
    """

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

    return load_checkpoint


@patch(_TRAINER, "PPOTrainer.init")
def watch_for_losses(original: Any) -> Any:
    """Let a run end with an error if it loses a worker or a node, or gets no resources.

    Symptom: the trainer waits forever, or ends with an unrelated error.
    Cause: verl/trainer/ppo/v1/agent_loop_tq.py starts episodes without waiting for them, so it does not notice the death
    of the process that runs them. verl/single_controller/ray/base.py:160 waits for resources without a limit.
    """

    def init(self: Any) -> None:
        from verl_ext.ray_watch import watch

        self.afm_watch = watch(self.config)
        with self.afm_watch.explaining():
            original(self)

    return init


@patch(_TRAINER, "PPOTrainer.fit")
def explain_losses(original: Any) -> Any:
    """Let an error of the run name the lost process that caused it, and end the watch with the run.

    Symptom: a run that lost a worker ends with an unrelated error.
    Cause: verl/trainer/ppo/v1/agent_loop_tq.py, as in :func:`watch_for_losses`.
    """

    def fit(self: Any, agent_loop_manager: Any) -> None:
        with self.afm_watch.explaining():
            original(self, agent_loop_manager)
        self.afm_watch.stop()

    return fit


@patch(_TRAINER, "PPOTrainer._val_metrics_update")
def average_scored_samples(original: Any) -> Any:
    """Compute a validation's accuracy over the scored samples only, and report means by our names.

    Symptom: a judge that abstained made the policy look worse.
    Cause: verl/trainer/ppo/metric_utils.py:971 counts each missing sample as wrong. With our sampler, samples without a
    score are missing (verl_ext/sampler.py drops them), including failed ones.
    """

    def _val_metrics_update(
        self: Any,
        data_sources: Any,
        sample_uids: Any,
        facts: Any,
        turns: Any,
        expected_acc_counts: Any = None,
    ) -> Any:
        ours = str(self.config.trainer.v1.sampler.custom_sampler.path) == SAMPLER
        expected = None if ours else expected_acc_counts
        means = original(self, data_sources, sample_uids, facts, turns, expected_acc_counts=expected)
        return means | validation_means(data_sources, facts)

    return _val_metrics_update


@patch("verl.experimental.agent_loop.agent_loop", "AgentLoopWorker._run_agent_loop")
def mark_validation(original: Any) -> Any:
    """Let an agent loop know whether its episode belongs to a validation.

    Symptom: `leave_out` also removed truncated episodes from validations, where they counted as wrong.
    Cause: verl/experimental/agent_loop/agent_loop.py:694 does not pass this fact to the loop.
    """
    global _original
    _original = original
    return _run_agent_loop


_original: Any = None
"""verl's original method. Ray sends the methods of an actor to its processes. It sends a function of a module by name, so
the process uses its own module. It sends any other function as a copy, with copies of verl's registries."""


async def _run_agent_loop(self: Any, sampling_params: Any, trajectory: Any, **row: Any) -> Any:
    with validation(bool(trajectory["validate"])):
        return await _original(self, sampling_params, trajectory, **row)


@patch(_TRAINER, "PPOTrainer._compute_advantage")
def complete_advantages(original: Any) -> Any:
    """Complete the advantages: of a teacher, of fillers (none), of an episode's trajectories. Write those of kept episodes.

    Symptom: a custom estimator gets neither log-probabilities nor what an agent loop adds to a sample. Fillers that differ in
    the penalty for length have advantages as large as any group. Kept episodes do not show what the update encouraged.
    Cause: verl/trainer/ppo/v1/trainer_base.py:1745 reads a fixed list of fields, verl/trainer/ppo/ray_trainer.py:251 passes
    a fixed list to an estimator, and only the workers get the result from the transfer queue.
    """

    def _compute_advantage(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        import transfer_queue

        computed = original(self, batch, metrics)
        if fillers := getattr(self.replay_buffer, "fillers", None):
            computed = without_advantage(transfer_queue, computed, fillers)
        if self.config.algorithm.adv_estimator == REVERSE_KL:
            computed, teacher = write_reverse_kl(transfer_queue, computed, self.config.algorithm.teacher_clip)
            metrics.update(teacher)
        elif CREDIT in self.config.trainer:
            computed = share_advantages(transfer_queue, computed, self.config)
        options = self.config.trainer.v1.sampler.get("sampler_kwargs") or {}
        if folder := options.get("output_dir"):
            keep_advantages(transfer_queue, batch, Path(folder), self.global_steps)
        return computed

    return _compute_advantage


@patch(_TRAINER, "create_rl_sampler")
def draw_by_difficulty(original: Any) -> Any:
    """Let ``data.curriculum`` choose the sampler of verl's data loader.

    Symptom: questions that every sample or no sample solves are asked as often as those with a signal.
    Cause: verl/trainer/ppo/utils.py:140 makes a random or a sequential sampler, and no setting chooses another one.
    """

    def create_rl_sampler(data_config: Any, dataset: Any) -> Any:
        if (rules := data_config.get("curriculum")) is None:
            return original(data_config, dataset)
        if (settings := rules.get("settings")) is None:
            return start_curriculum(data_config, dataset)
        from verl_ext.settings import agents_of_rows

        return start_curriculum(data_config, dataset, agents_of_rows(dataset, settings))

    return create_rl_sampler


@patch("verl.trainer.ppo.v1.utils", "MetricsAggregator._get_aggregation_type")
def add_up_what_is_counted(original: Any) -> Any:
    """Add up counts and average means over the updates of a step (``separate_async`` trainer).

    Symptom: counts of groups were averages, the slowest episode was a mean, ``source/minerva_math/score`` was a minimum.
    Cause: verl/trainer/ppo/v1/utils.py:83 decides by parts of a metric's name: "max", "min", "sum", "total", else a mean.
    """

    def _get_aggregation_type(self: Any, metric_name: str) -> str:
        return aggregation_of(metric_name) or str(original(self, metric_name))

    return _get_aggregation_type


@patch("verl.trainer.ppo.v1.utils", "MetricsAggregator._get_metric_weight")
def weigh_shares_by_tokens(original: Any) -> Any:
    """Weight the unused share of tokens by tokens instead of samples.

    Symptom: ``groups/unused_share`` of a step was not the share of its tokens.
    Cause: verl/trainer/ppo/v1/utils.py:83 weights every mean by the trained samples of each update.
    """

    def _get_metric_weight(self: Any, metric_name: str, metrics: Mapping[str, Any], sample_count: int) -> int:
        if metric_name == UNUSED_SHARE and AGENT_TOKENS in metrics:
            return int(metrics[AGENT_TOKENS])
        return int(original(self, metric_name, metrics, sample_count))

    return _get_metric_weight


def register() -> None:
    """Register platform, rollout engine and patches. verl's import calls it, and further calls change nothing."""
    check_verl()
    after_import("verl.trainer.ppo.core_algos", _estimator)
    after_import("verl.workers.rollout.base", _rollout_adapter)
    after_import("verl.workers.rollout.replica", _rollout_replica)
    sync_patches.register()
    cpu = os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"
    for change in PATCHES:
        if cpu or not change.cpu_only:
            change.install()
    if cpu:
        import verl_ext.platform_cpu  # noqa: F401 - registers itself with verl's PlatformRegistry

        # verl registers its FSDP engines for cuda and npu only, but the class runs on a CPU unchanged.
        os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")


def _estimator(module: ModuleType) -> None:
    if REVERSE_KL not in target(module, "ADV_ESTIMATOR_REGISTRY"):
        target(module, "register_adv_est")(REVERSE_KL)(placeholder_estimator)


def _rollout_adapter(module: ModuleType) -> None:
    registry = target(module, "_ROLLOUT_REGISTRY")
    registry[(CPU_ENGINE, "async")] = "verl_ext.rollout_cpu.CpuRolloutAdapter"


def _rollout_replica(module: ModuleType) -> None:
    target(module, "RolloutReplicaRegistry").register(CPU_ENGINE, _load_replica)


def _load_replica() -> type:
    from verl_ext.rollout_cpu import CpuReplica

    return CpuReplica
