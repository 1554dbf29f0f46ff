import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from afm.errors import EngineError
from verl_ext import compat
from verl_ext.hooks import after_import
from verl_ext.validation import average_scored_samples

pytest.importorskip("verl")


@pytest.mark.parametrize(
    "patch",
    [
        compat.use_gloo_alone,
        compat.drop_pinned_offload,
        compat.load_value_head_with_sdpa,
        compat.save_when_asked,
    ],
)
def test_a_patch_whose_target_is_gone_fails_loudly(patch: compat.Patch) -> None:
    with pytest.raises(EngineError, match=r"upstream has no \w+: this verl differs from release 0\.9\.1"):
        patch(ModuleType("upstream"))


def test_patching_twice_is_patching_once() -> None:
    seen = []
    module = ModuleType("upstream")
    module.initialize_global_process_group_ray = lambda **given: seen.append(given)  # type: ignore[attr-defined]
    compat.use_gloo_alone(module)
    once = module.initialize_global_process_group_ray
    compat.use_gloo_alone(module)
    assert module.initialize_global_process_group_ray is once
    once(timeout_second=5)
    once(backend="nccl")
    assert seen == [
        {"timeout_second": 5, "backend": "cpu:gloo"},
        {"timeout_second": None, "backend": "nccl"},
    ]


def test_a_validation_is_averaged_over_the_samples_that_have_a_score() -> None:
    """Two of four were judged, one right: 1/2 with our sampler, which leaves the others out; verl's own says 1/4."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import trainer_base

    class Trainer:
        _val_metrics_update = trainer_base.PPOTrainer._val_metrics_update

        def __init__(self, path: str | None) -> None:
            keys = {"trainer": {"v1": {"sampler": {"custom_sampler": {"path": path}}}}}
            self.config = OmegaConf.create(keys)

    average_scored_samples(SimpleNamespace(PPOTrainer=Trainer, __name__="verl"))  # type: ignore[arg-type]
    found = [
        Trainer(path)._val_metrics_update(
            ["math"] * 2,
            ["a", "b"],
            {"reward": [1.0, 0.0], "acc": [1.0, 0.0]},
            [],
            expected_acc_counts={("math", uid): 1 for uid in "abcd"},
        )["val-core/math/acc/mean@1"]
        for path in ("pkg://verl_ext.sampler", None)
    ]
    assert found == [0.5, 0.25]


def test_the_installed_verl_is_the_supported_one() -> None:
    assert version("verl") == compat.VERL_VERSION
    compat.check_verl()


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


def test_importing_the_package_outside_verl_registers_nothing() -> None:
    code = (
        "import sys, verl_ext, verl_ext.launcher; print(sorted({'verl', 'ray', 'torch'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


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
"""
    import os

    variables = os.environ | {"VERL_USE_EXTERNAL_MODULES": "verl_ext", "VERL_PLATFORM": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables
    )
    assert result.stdout.splitlines()[-2:] == ["cpu CpuRolloutAdapter CpuReplica", "[True, True, True]"]
