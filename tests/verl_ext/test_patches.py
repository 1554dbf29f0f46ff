import inspect
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from extras import needs

from afm.errors import EngineError
from verl_ext import patches, patching, sync_patches
from verl_ext.algorithms import CHOICES
from verl_ext.checkpoints import CHECKPOINT_REQUEST, saved_step, stored_metrics
from verl_ext.metrics import aggregation_of
from verl_ext.patching import PATCHES, Patch, after_import

needs("verl")


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.attribute)
def test_a_patch_whose_target_is_gone_fails_loudly(patch: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    release = patch.release
    monkeypatch.setattr(patching, "version", {release.package: release.version}.get)
    message = rf"upstream has no \w+: this {release.package} differs from release {release.version}"
    with pytest.raises(EngineError, match=message):
        patch.apply(ModuleType("upstream"))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.attribute)
def test_a_patch_says_what_it_mends_and_where_verl_causes_it(patch: Patch) -> None:
    text = inspect.getdoc(patch.replacement) or ""
    files = re.findall(r"verl/[\w/]+\.py", text)
    assert "Cause: " in text
    assert files
    installed = Path(str(find_spec("verl").origin)).parent.parent  # type: ignore[union-attr]
    assert [file for file in files if not (installed / file).is_file()] == []


@pytest.mark.parametrize("page", ["docs/design.md", "docs/rl.md"])
def test_the_documents_count_the_patches(page: str) -> None:
    on_cpu = sum(patch.cpu_only for patch in PATCHES)
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    assert f"{len(PATCHES)} patches" in text
    assert page != "docs/rl.md" or f"{on_cpu} are only for CPUs" in text


def test_another_release_is_not_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    patching.check_verl()
    monkeypatch.setattr(patching, "version", lambda name: "0.9.2")
    message = r"verl 0\.9\.2 is installed; verl_ext supports only verl 0\.9\.1"
    with pytest.raises(EngineError, match=message):
        patches.use_gloo_alone.apply(ModuleType("upstream"))


def apply_to_trainer(patch: Patch, trainer: type) -> None:
    """Apply a patch of verl's trainer to a class that replaces the trainer."""
    patch.apply(SimpleNamespace(PPOTrainer=trainer, __name__="verl"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("every", "saved"), [(2, []), (3, [4]), (-1, [4])])
def test_a_checkpoint_that_is_asked_for_is_saved_once(tmp_path: Path, every: int, saved: list[int]) -> None:
    """The request is in step 4. If ``save_freq`` plans a checkpoint for that step, verl saves it."""
    keys = SimpleNamespace(default_local_dir=str(tmp_path / "checkpoints"), save_freq=every)

    class Trainer:
        config = SimpleNamespace(trainer=keys)
        global_steps = 4

        def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> str:
            return "batch"

        def _save_checkpoint(self) -> None:
            steps.append(self.global_steps)

    steps: list[int] = []
    apply_to_trainer(patches.save_when_asked, Trainer)
    assert Trainer().step({}, {}) == "batch"
    assert steps == []
    (tmp_path / CHECKPOINT_REQUEST).touch()
    Trainer().step({}, {})
    Trainer().step({}, {})
    assert steps == saved


def test_patching_twice_is_patching_once() -> None:
    seen = []
    module = ModuleType("upstream")
    module.initialize_global_process_group_ray = lambda **options: seen.append(options)  # type: ignore[attr-defined]
    patches.use_gloo_alone.apply(module)
    patched = module.initialize_global_process_group_ray
    patches.use_gloo_alone.apply(module)
    assert module.initialize_global_process_group_ray is patched
    patched(timeout_second=5)
    patched(backend="nccl")
    assert [(options["timeout_second"], options["backend"]) for options in seen] == [
        (5, "cpu:gloo"),
        (None, "nccl"),
    ]


@pytest.mark.parametrize(("path", "mean"), [("pkg://verl_ext.sampler", 0.5), (None, 0.25)])
def test_a_validation_is_averaged_over_the_samples_that_have_a_score(path: str | None, mean: float) -> None:
    """Two of four have a score, one of them 1: the mean is 1/2 with our sampler, and 1/4 with verl's."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import trainer_base

    class Trainer:
        _val_metrics_update = trainer_base.PPOTrainer._val_metrics_update
        config = OmegaConf.create({"trainer": {"v1": {"sampler": {"custom_sampler": {"path": path}}}}})

    apply_to_trainer(patches.average_scored_samples, Trainer)
    scores = {"reward": [1.0, 0.0], "acc": [1.0, 0.0]}
    expected = {("math", uid): 1 for uid in "abcd"}
    update = Trainer()._val_metrics_update
    metrics = update(["math"] * 2, ["a", "b"], scores, [], expected_acc_counts=expected)
    assert metrics["val-core/math/acc/mean@1"] == mean


@pytest.mark.parametrize(("mode", "expected"), [("sync", 4), ("colocate_async", 2)])
def test_a_save_that_ends_before_the_queue_is_whole_for_a_synchronous_trainer_only(
    tmp_path: Path, mode: str, expected: int
) -> None:
    """The run was killed after ``data.pt`` of step 4. The save of step 2 is complete."""
    import torch
    from omegaconf import OmegaConf

    class Trainer:
        config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path), "save_freq": 2}})
        trainer_mode = mode

        def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> None:
            metrics["rollout/score"] = self.global_steps / 8

        def _save_checkpoint(self) -> None:
            folder = tmp_path / f"global_step_{self.global_steps}"
            (folder / "actor").mkdir()
            for kind in ("model", "optim", "extra_state"):
                (folder / "actor" / f"{kind}_world_size_1_rank_0.pt").touch()
            torch.save({}, folder / "data.pt")
            if self.global_steps == 2 and self.trainer_mode != "sync":
                (folder / "transfer_queue").mkdir()
                (folder / "transfer_queue" / "metadata.json").touch()

    apply_to_trainer(patches.save_when_asked, Trainer)
    apply_to_trainer(patches.tell_whole_checkpoints, Trainer)
    trainer: Any = Trainer()
    for trainer.global_steps in (2, 4):
        trainer.step({"no number": "x"}, {"gen": 1.5})
        trainer._save_checkpoint()
    assert saved_step(tmp_path) == expected
    metrics = {"rollout/score": 0.5, "timing_s/gen": 1.5}
    assert stored_metrics(tmp_path / "global_step_4") == metrics


@pytest.mark.parametrize("mode", CHOICES["actor_rollout_ref.actor.loss_agg_mode"])
def test_the_entropy_is_a_tokens_mean_in_every_mode_of_the_loss(mode: str) -> None:
    """Tokens trained on: 0.5, 1.0, 0.5 and 2.0; their mean is 1, the sums of the two responses are 2 and 2."""
    import torch
    from verl.trainer.ppo import core_algos

    module = ModuleType("upstream")
    module.agg_loss = core_algos.agg_loss  # type: ignore[attr-defined]
    patches.report_entropy_of_a_token.apply(module)
    patches.report_entropy_of_a_token.apply(module)
    entropy_BT = torch.tensor([[0.5, 1.0, 0.5, 9.0], [2.0, 9.0, 9.0, 9.0]])
    mask_BT = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    options = {"loss_agg_mode": mode, "loss_scale_factor": 4}
    found = module.agg_loss(loss_mat=entropy_BT, loss_mask=mask_BT, **options)
    assert found.item() == 1.0


def test_verls_trainer_puts_nothing_but_the_entropy_together_there() -> None:
    from verl.trainer.ppo.v1 import trainer_base

    source = inspect.getsource(trainer_base)
    assert source.count("agg_loss(") == 1
    assert "entropy_agg = agg_loss(" in source


def test_a_hook_runs_once_right_after_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[int] = []

    def hook(module: ModuleType) -> None:
        seen.append(module.value)
        module.value = 2

    after_import("imported_later", hook)
    after_import("imported_later", hook)
    assert seen == []
    import imported_later

    assert seen == [1]
    assert imported_later.value == 2
    after_import("imported_later", hook)
    assert seen == [1, 2]


@pytest.mark.slow
def test_verl_finds_our_platform_engine_and_patches_in_every_process() -> None:
    code = """
import verl
from verl.plugin.platform import get_platform
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
import verl.utils.distributed, verl.utils.model, verl.workers.engine.fsdp.transformer_impl as fsdp
print(get_platform().device_name, get_rollout_class("afm_cpu").__name__, get_rollout_replica_class("afm_cpu").__name__)
print([f.patched_by_afm for f in (verl.utils.distributed.initialize_global_process_group_ray,
      verl.utils.model.load_valuehead_model, fsdp.CPUOffloadPolicy)])
from verl.trainer.ppo.v1 import trainer_base
print(trainer_base.agg_loss.patched_by_afm, trainer_base.MetricsAggregator()._get_aggregation_type("groups/kept"))
"""
    variables = os.environ | {"VERL_USE_EXTERNAL_MODULES": "verl_ext", "VERL_PLATFORM": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables
    )
    expected = ["cpu CpuRolloutAdapter CpuReplica", "[True, True, True]", "True sum"]
    assert result.stdout.splitlines()[-3:] == expected


@pytest.fixture
def aggregator() -> Any:
    from verl.trainer.ppo.v1 import utils

    module = ModuleType("upstream")
    module.MetricsAggregator = type("MetricsAggregator", (utils.MetricsAggregator,), {})  # type: ignore[attr-defined]
    for patch in (patches.add_up_what_is_counted, patches.weigh_shares_by_tokens) * 2:
        patch.apply(module)
    return module.MetricsAggregator()


MERGED = {  # metrics of a step of 30 samples, of one of 10, and of both
    "groups/generated": (10.0, 6.0, 16.0),
    "groups/agent_tokens": (300.0, 100.0, 400.0),
    "groups/unused_share": (0.5, 0.1, 0.4),  # (150 + 10) of 400 tokens
    "rollout/score": (0.2, 0.6, 0.3),
    "rollout/summary": (1.0, 2.0, 1.25),
    "rollout/slowest_seconds": (9.0, 4.0, 9.0),
    "source/minerva_math/score": (0.8, 0.4, 0.7),
    "source/maximum/correct": (0.0, 1.0, 0.25),
    "curriculum/asked": (5.0, 8.0, 8.0),
    "validation/total": (0.5, 0.5, 0.5),
    "actor/grad_norm_max": (2.0, 3.0, 3.0),
    "training/global_step": (7, 8, 8.0),
}


def test_counts_are_added_and_means_weighted_whatever_their_names_hold(aggregator: Any) -> None:
    for at, count in enumerate((30, 10)):
        step = {name: values[at] for name, values in MERGED.items()}
        aggregator.add_step_metrics(step, sample_count=count)
    expected = {name: values[2] for name, values in MERGED.items()}
    assert aggregator.get_aggregated_metrics() == pytest.approx(expected)


def test_verls_own_metrics_stay_as_they_are() -> None:
    theirs = (
        "validation/off_policy/evicted_samples", "training/filter_groups/evicted_samples", "timing_s/gen", "actor/lr",
        "rollout/moe/load_max", "rollout_corr/k3_kl", "critic/score/min",
    )  # fmt: skip
    assert [aggregation_of(name) for name in theirs] == [None] * len(theirs)


@pytest.mark.parametrize(
    ("choices", "forward_only", "order"),
    [
        ({}, False, [1, 2, 0]),
        ({}, True, [0, 1, 2]),  # its outputs belong to the rows
        ({"return_model_output": True}, False, [0, 1, 2]),
        ({"use_dynamic_bsz": True}, False, [0, 1, 2]),
    ],
)
def test_rows_are_trained_by_length(choices: dict[str, bool], forward_only: bool, order: list[int]) -> None:
    import torch
    from verl.utils import tensordict_utils

    rows = [torch.full((length,), number) for number, length in enumerate((5, 2, 3))]
    fields = {
        "input_ids": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "score": torch.arange(3.0),
        "uid": ["0", "1", "2"],
    }
    data = tensordict_utils.get_tensordict(
        fields, {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1} | choices
    )
    seen = []

    class Engine:
        def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> str:
            assert tensordict_utils.get_non_tensor_data(data, "micro_batch_size_per_gpu", default=0) == 1
            uids = [str(uid) for uid in data["uid"]]
            seen.append(([row.tolist() for row in data["input_ids"].unbind()], data["score"].tolist(), uids))
            return loss_function

    upstream = ModuleType("upstream")
    vars(upstream)["FSDPEngine"] = Engine
    patches.train_like_lengths_together.apply(upstream)
    assert Engine().forward_backward_batch(data, "loss", forward_only=forward_only) == "loss"
    assert seen == [
        ([rows[number].tolist() for number in order], [float(number) for number in order], [*map(str, order)])
    ]


def test_rows_that_fill_a_batch_are_spread_over_its_mini_batches() -> None:
    """One of 33 rows would be alone in the second mini batch of 32 rows."""
    from transfer_queue import KVBatchMeta

    class Trainer:
        actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0]})

        def _balance_batch(self, batch: Any, metrics: Any) -> Any:
            return batch

    apply_to_trainer(patches.spread_padding, Trainer)
    real = [{"is_padding": row >= 33, "row": row} for row in range(64)]
    batch = KVBatchMeta(keys=[f"k{tag['row']}" for tag in real], tags=real, partition_id="train")
    spread = Trainer()._balance_batch(batch, {})
    counts = [sum(not tag["is_padding"] for tag in spread.tags[begin : begin + 32]) for begin in (0, 32)]
    assert counts in ([16, 17], [17, 16])
    assert spread.keys == [f"k{tag['row']}" for tag in spread.tags]


def test_a_checkpoint_holds_what_an_adapters_scale_depends_on() -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    from verl_ext.lora import scale_of

    sync_patches.store_how_an_adapter_scales.install()
    config = LoraConfig(r=16, lora_alpha=32, use_rslora=True, target_modules=["0"])
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), config)
    meta = FSDPCheckpointManager._get_lora_train_meta(None, model)
    assert scale_of(json.loads(json.dumps(meta))) == model.base_model.model[0].scaling["default"] == 8
    for pattern in ({"rank_pattern": {"q": 4}}, {"alpha_pattern": {"q": 4}}):
        with pytest.raises(EngineError, match="one rank and one alpha"):
            scale_of(meta | pattern)
    assert FSDPCheckpointManager._get_lora_train_meta(None, torch.nn.Linear(2, 2)) is None
