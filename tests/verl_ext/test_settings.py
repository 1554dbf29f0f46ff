from pathlib import Path

import pytest

from afm.errors import ConfigError, UsageError
from verl_ext.settings import load_episode_settings, load_settings

MINIMAL = """
agent: math
model: some/model
train_files: train.parquet
output_dir: out
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "rl.yaml"
    path.write_text(text)
    return path


def test_overrides_reach_nested_keys_and_are_yaml(tmp_path: Path) -> None:
    overrides = [
        "seed=3",
        "verl.trainer.logger=[console]",
        "limits.max_response_tokens=144",
        "verl.a.lr=1e-6",
    ]
    settings = load_settings(write(tmp_path, MINIMAL), overrides)
    assert settings.seed == 3
    assert settings.verl == {"trainer": {"logger": ["console"]}, "a": {"lr": 1e-6}}
    limits = settings.spec().limits
    assert (limits.max_response_tokens, limits.max_turns) == (144, 8)  # the agent's own stays
    assert settings.train_files == ("train.parquet",)  # one file may be written without a list
    assert settings.platform == "gpu"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("agnet: code", "agnet: unknown key; did you mean 'agent'?"),
        ("limits: {max_turn: 2}", "'max_turn' is unknown; did you mean 'max_turns'?"),
        ("train_files: []", "train_files: got"),
    ],
)
def test_a_wrong_setting_is_named_with_a_way_out(tmp_path: Path, extra: str, message: str) -> None:
    text = "\n".join(line for line in MINIMAL.splitlines() if line.split(":")[0] != extra.split(":")[0])
    with pytest.raises(ConfigError) as caught:
        load_settings(write(tmp_path, f"{text}\n{extra}\n"))
    assert message in str(caught.value)
    assert "rl.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "overrides", "error", "message"),
    [
        ("", ["seed=3", "platform=tpu"], UsageError, "override 'platform=tpu': platform: got 'tpu'"),
        ("", ["limits.max_turn=2"], UsageError, "override 'limits.max_turn=2': limits: got .*'max_turn' is unknown"),
        ("agnet: x\n", ["platform=tpu"], ConfigError, "rl.yaml: agnet: unknown key"),
    ],
)  # fmt: skip
def test_what_an_override_broke_is_blamed_on_it(
    tmp_path: Path, extra: str, overrides: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_settings(write(tmp_path, MINIMAL + extra), overrides)


def test_worker_processes_read_their_part_of_the_same_file(tmp_path: Path) -> None:
    """A user of stock verl only writes that part."""
    path = write(tmp_path, MINIMAL.replace("model: some/model", "") + "verl: {a: 1}\nplatform: cpu\n")
    assert load_episode_settings(path).agent == "math"
    settings = load_episode_settings(write(tmp_path, "agent: code\n"))
    assert (settings.spec().name, settings.output_dir) == ("code", None)


def test_files_named_in_the_yaml_are_relative_to_it_and_overrides_are_not(tmp_path: Path) -> None:
    text = MINIMAL.replace("agent: math", "agent: ../agents/mine.yaml") + "tools: tools.yaml\n"
    path = write(tmp_path, text)
    settings = load_settings(path)
    assert settings.agent == str(tmp_path / "../agents/mine.yaml")
    assert settings.tools == tmp_path / "tools.yaml"
    assert settings.model == "some/model"
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/config.json").touch()
    assert load_settings(path, [f"model={tmp_path}/run"]).model == f"{tmp_path}/run/model"
    assert load_settings(path, ["tools=mine.yaml", "agent=code"]).tools == Path("mine.yaml")
    assert load_settings(path, ["agent=code"]).agent == "code"


def test_a_yaml_extends_another_and_changes_single_keys(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    base = MINIMAL + "tools: tools.yaml\nverl: {a: {b: 1, c: [1, 2]}}\n"
    (tmp_path / "base" / "base.yaml").write_text(base)
    path = write(tmp_path, "extends: base/base.yaml\nverl: {a: {c: [3]}}\nseed: 4\n")
    settings = load_settings(path)
    assert settings.verl == {"a": {"b": 1, "c": [3]}}
    assert settings.tools == tmp_path / "base" / "tools.yaml"
