"""Loading a checkpoint with another number of training workers than stored it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from extras import needs

from afm.errors import ConfigError, EngineError

needs("verl")

pytestmark = pytest.mark.slow

RUNS = ("two", "three", "one again")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    words = [sys.executable, str(Path(__file__).with_name("sharded_training.py")), str(folder)]
    root = str(Path(__file__).resolve().parents[2])
    variables = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_ext", "OMP_NUM_THREADS": "1"}
    path = {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(words, env=os.environ | variables | path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def had(folder: Path, name: str) -> dict[str, Any]:
    import torch

    return dict(torch.load(folder / f"{name}.pt", weights_only=False))


def moments(state: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{number}.{key}": value
        for number, entry in state["optimizer"]["state"].items()
        for key, value in entry.items()
    }


@pytest.mark.parametrize("name", RUNS)
def test_weights_moments_step_counts_and_schedule_are_those_stored(folder: Path, name: str) -> None:
    import torch

    before, after = had(folder, "one")["loaded"], had(folder, name)["loaded"]
    for of in (lambda state: state["model"], moments):
        stored, found = of(before), of(after)
        assert stored.keys() == found.keys()
        assert all(torch.equal(stored[key], found[key]) for key in stored)
    assert moments(after)["0.step"] == 3
    assert moments(after)["0.exp_avg"].abs().sum() > 0
    assert after["optimizer"]["param_groups"] == before["optimizer"]["param_groups"]
    assert after["schedule"] == before["schedule"]


@pytest.mark.parametrize("name", RUNS)
def test_training_goes_on_as_if_nothing_had_changed(folder: Path, name: str) -> None:
    import torch

    expected, found = had(folder, "one")["trained"], had(folder, name)["trained"]
    assert all(torch.allclose(expected[key], found[key], rtol=0, atol=1e-6) for key in expected)
    before = had(folder, "one")["loaded"]["model"]
    assert not torch.equal(expected["lm_head.weight"], before["lm_head.weight"])


@pytest.mark.parametrize("name", RUNS)
def test_a_worker_goes_on_with_the_random_numbers_of_its_rank(folder: Path, name: str) -> None:
    import torch

    assert torch.equal(had(folder, name)["loaded"]["random"], had(folder, "one")["loaded"]["random"])


@pytest.mark.parametrize(("name", "file_bytes"), [(name, 2**30) for name in RUNS] + [("three", 4000)])
def test_the_parts_of_all_workers_are_one_model(
    folder: Path, tmp_path: Path, name: str, file_bytes: int
) -> None:
    import shutil

    import torch
    from transformers import AutoModelForCausalLM

    from verl_ext.shards import write_model

    shutil.copytree(folder / name / "huggingface", tmp_path / "model")
    write_model(folder / name, tmp_path / "model", file_bytes)
    files = len(list((tmp_path / "model").glob("model*.safetensors")))
    assert (files == 1) == (file_bytes == 2**30)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    expected = had(folder, name)["loaded"]["model"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_missing_part_is_named_and_a_downloaded_pickle_is_not_loaded(folder: Path, tmp_path: Path) -> None:
    import shutil

    from verl_ext.shards import read_shards

    shutil.copytree(folder / "two", tmp_path / "two")
    (tmp_path / "two" / "optim_world_size_2_rank_1.pt").unlink()
    with pytest.raises(EngineError, match=r"written by 2 workers, but .*optim_world_size_2_rank_1\.pt"):
        read_shards(tmp_path / "two", "optim")
    assert len(read_shards(tmp_path / "two", "model")) == 2
    (tmp_path / "download.manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"two holds pickles, which can run code: .* was downloaded"):
        read_shards(tmp_path / "two", "model")


def test_what_fsdp2_does_not_store_is_refused() -> None:
    import torch

    from verl_ext.shards import ShardReader

    class Flat(torch.Tensor):
        pass

    with pytest.raises(EngineError, match=r"weight is stored as Flat.*strategy=fsdp2"):
        ShardReader([{"weight": torch.zeros(2).as_subclass(Flat)}])
