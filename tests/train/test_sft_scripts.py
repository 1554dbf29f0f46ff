import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from extras import needs

needs("llamafactory")

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "train").glob("*/sft/*.sh"))
SET = {"RANK": "1", "NNODES": "2", "MASTER_ADDR": "node0", "MODEL": "my model", "DATA_DIR": "my data"}
UNSET = {*SET, "LORA", "NODE_RANK", "MASTER_PORT", "OUTPUT_DIR"}


def dry_run(script, *arguments, cwd="/", **variables):
    env = {key: value for key, value in os.environ.items() if key not in UNSET} | variables
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    command = [script, "--dry-run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, check=False)


def config_of(result):
    """The configuration that a dry run prints before the command."""
    return yaml.safe_load(result.stdout.rpartition("\n\n")[0])


def words_of(result):
    """The words of the command that a dry run prints last."""
    return shlex.split(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: "-".join(path.relative_to(ROOT).parts[1::2]))
def test_every_script_is_thin_and_prints_the_command_it_would_run(script, tmp_path):
    target = tmp_path / "to here"
    result = dry_run(script, f"output_dir={target}", "learning_rate=1e-6", **SET)
    assert result.returncode == 1
    assert "error: this would not start: model_name_or_path: 'my model' is not a folder" in result.stderr
    assert "error: this would not start: dataset_dir: my data/dataset_info.json" in result.stderr
    gpu = "tiny" not in script.name and shutil.which("nvidia-smi") is None
    assert ("warning: this recipe needs a GPU" in result.stderr) is gpu
    config = config_of(result)
    assert (config["model_name_or_path"], config["dataset_dir"]) == ("my model", "my data")
    assert config["learning_rate"] == 1e-6
    words = words_of(result)
    assert words[-2:] == ["train", f"{target}/sft_config.node1.yaml"]
    if "qwen" in script.name:
        nodes = {"FORCE_TORCHRUN=1", "NNODES=2", "NODE_RANK=1", "MASTER_ADDR=node0", "MASTER_PORT=29500"}
        assert nodes <= set(words)
    assert not target.exists()
    lines = script.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 40
    assert any(line.startswith("# Usage") for line in lines)
    assert "set -euo pipefail" in lines
    assert lines[-1].endswith('"$@"')
    assert os.access(script, os.X_OK)


@pytest.mark.slow
def test_two_nodes_must_say_which_is_which():
    """By the script's variable or by torchrun's."""
    nodes = {"NNODES": "2", "MASTER_ADDR": "node0"}
    for rank in ({}, {"RANK": "2"}, {"RANK": "one"}):
        result = dry_run(SCRIPTS[0], **nodes, **rank)
        assert result.returncode == 1
        assert "NODE_RANK: set it to the number of this node (scripts: RANK)" in result.stderr
    assert {"NODE_RANK=1", "NNODES=2"} <= set(words_of(dry_run(SCRIPTS[0], **nodes, NODE_RANK="1")))


@pytest.mark.slow
def test_folders_are_those_of_the_caller_and_defaults_those_of_the_project(tmp_path):
    (tmp_path / "my model").mkdir()
    script = ROOT / "train/code_agent/sft/sft_qwen2.5_7b.sh"
    result = dry_run(script, cwd=tmp_path, MODEL="my model", DATA_DIR="my data", OUTPUT_DIR="my run")
    assert "my model" not in result.stderr  # it was found, beside the caller
    assert "error: this would not start: dataset_dir: my data/dataset_info.json" in result.stderr
    default = config_of(dry_run(script))
    assert default["dataset_dir"] == f"{ROOT}/data/code_agent/sft"
    assert default["output_dir"] == f"{ROOT}/models/code_agent_7b_sft"


@pytest.mark.slow
def test_the_32b_script_alone_is_the_first_node_as_published_and_beside_another_asks_which_it_is():
    script = ROOT / "train/code_agent/sft/sft_qwen2.5_32b.sh"
    result = dry_run(script, MASTER_ADDR="node0")
    assert result.returncode != 0
    assert "RANK: set it to the number of this node" in result.stderr
    result = dry_run(script, HOSTNAME="this-one")
    assert {"NNODES=2", "NODE_RANK=0", "MASTER_ADDR=this-one"} <= set(words_of(result))
    assert "start the others with RANK=1 MASTER_ADDR=this-one" in result.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_lora_is_a_variable_away(script):
    config = config_of(dry_run(script, LORA="1", **SET))
    assert config["finetuning_type"] == "lora"
    assert "lora" in config["output_dir"]
    assert config["dataset"] == f"{script.parts[-3].partition('_')[0]}_agent_sft"


def test_lora_is_on_or_off():
    for value in ("0", ""):
        config = config_of(dry_run(SCRIPTS[0], LORA=value, **SET))
        assert (config["finetuning_type"], "lora" in config["output_dir"]) == ("full", False)
    result = dry_run(SCRIPTS[0], LORA="yes", **SET)
    assert (result.returncode, result.stderr) == (2, "LORA=yes: expected 0 or 1\n")
