import sys
import tomllib
from pathlib import Path

import pytest

from afm.errors import ConfigError, MissingExtraError
from llamafactory_patch.checks import check_trackers, tracker_settings, tracker_variables
from llamafactory_patch.config import SftJob

ROOT = Path(__file__).parents[2]


def job(**config):
    return SftJob(config, Path("out"))


def test_everything_lands_in_the_output_folder():
    assert (tracker_variables(job()), tracker_settings(job())) == ({}, {})
    wanted = job(report_to=["tensorboard", "wandb"], use_swanlab=True)
    variables = {"TENSORBOARD_LOGGING_DIR": "out/tensorboard", "WANDB_DIR": str(Path("out").resolve())}
    assert tracker_variables(wanted) == variables
    assert tracker_settings(wanted) == {"swanlab_logdir": "out/swanlab"}


def test_a_missing_key_is_found_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="set SWANLAB_API_KEY, or swanlab_mode=offline"):
        check_trackers(job(use_swanlab=True), {})
    check_trackers(job(use_swanlab=True), {"SWANLAB_API_KEY": "k"})
    check_trackers(job(use_swanlab=True, swanlab_mode="offline"), {})
    with pytest.raises(ConfigError, match="set WANDB_API_KEY, or WANDB_MODE=offline"):
        check_trackers(job(report_to="wandb"), {})
    check_trackers(job(report_to=["wandb"]), {"WANDB_MODE": "offline"})
    (tmp_path / ".netrc").write_text("machine api.wandb.ai password k", encoding="utf-8")
    check_trackers(job(report_to="wandb"), {})


def test_settings_that_would_fail_late_or_silently_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="swanlab_mode: got 'clowd', expected one of cloud, local"):
        check_trackers(job(use_swanlab=True, swanlab_mode="clowd"), {})
    with pytest.raises(ConfigError, match="use_swanlab=true"):
        check_trackers(job(report_to=["swanlab"]), {})
    for package in ("swanboard", "tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps swanboard==0.1.10b2"):
        check_trackers(job(use_swanlab=True, swanlab_mode="local"), {})
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for package in ("tensorboard", "wandb"):
        with pytest.raises(MissingExtraError, match=rf"{package} is not installed.*\[trackers\]"):
            check_trackers(job(report_to=package), {})
    assert {"swanlab", "tensorboard", "wandb"} == {name.partition(">")[0] for name in extra["trackers"]}
