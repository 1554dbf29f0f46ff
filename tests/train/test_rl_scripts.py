"""Every RL script and configuration resolves to a command that verl accepts, without a GPU."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from extras import needs
from typer.testing import CliRunner

from afm.cli.commands import app
from afm.cli.reproduce_word_problems import WORD_PROBLEMS
from verl_ext import launcher
from verl_ext.command import command
from verl_ext.settings import RlSettings, load_settings

needs("verl")

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs" / "rl").glob("*.yaml")) + sorted((ROOT / "configs/tiny/rl").glob("*.yaml"))
SCRIPTS = sorted((ROOT / "train").glob("*/rl/*.sh"))


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@cache
def composed(path: Path, *overrides: str) -> tuple[RlSettings, Any]:
    settings = load_settings(path, overrides)
    return settings, command(settings, "/tmp/ray")[1]


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program `afm` that prints its working folder and its words."""
    program = tmp_path_factory.mktemp("bin") / "afm"
    text = "import json, os, sys\nprint(json.dumps([os.getcwd(), *sys.argv[1:]]))\n"
    program.write_text(f"#!{sys.executable}\n{text}", "utf-8")
    program.chmod(0o755)
    return program.parent


def run_script(
    script: Path, programs: Path, *words: str, cwd: Path | str = "/", **variables: str
) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", **variables}
    return subprocess.run([str(script), *words], capture_output=True, text=True, cwd=cwd, env=env)


@pytest.fixture
def dry_run(recorder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """What the command of a script prints. It runs in this process, where verl is loaded once for all scripts."""

    def launch(words: list[str]) -> int:
        assert words[1:4] == ["-P", "-m", launcher.__name__]
        return launcher.main(words[4:])

    def run(script: Path, *arguments: str, **variables: str) -> Result:
        done = run_script(script, recorder, "--dry-run", *arguments, **variables)
        assert done.returncode == 0, done.stderr
        folder, *words = json.loads(done.stdout)
        assert folder == str(ROOT)
        return CliRunner().invoke(app, words)

    monkeypatch.setattr("afm.cli.train.run_words", launch)
    return run


def only_misses_things(result: Result) -> bool:
    """Whether a dry run found nothing wrong but data, models and packages that are not on this machine."""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    missing = all(line.startswith("error: this would not start: ") for line in errors)
    absent = any(".parquet: no such file" in line for line in errors)
    return result.exit_code == 1 and missing and absent and isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_every_configuration_composes(path: Path) -> None:
    settings, config = composed(path)
    assert config.data.max_response_length == settings.spec().limits.max_response_tokens
    assert config.trainer.save_freq > 0
    head = path.read_text().split("\nagent:")[0].split("\nextends:")[0]
    assert "Hardware:" in head
    assert "Expected:" in head


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["colocate", "separate"])
def test_asynchronous_trainers_are_laid_over_a_recipe(mode: str, tmp_path: Path) -> None:
    files = [str(ROOT / "configs/rl" / name) for name in ("code_dapo_7b.yaml", f"async/{mode}.yaml")]
    path = tmp_path / "async.yaml"
    path.write_text(f"extends: {files}")
    _, config = composed(path)
    assert config.trainer.v1.trainer_mode == f"{mode}_async"
    assert config.trainer.v1.sampler.max_off_policy_threshold == 3
    if mode == "separate":
        each_sync = config.actor_rollout_ref.actor.ppo_mini_batch_size
        steps = config.trainer.v1.separate_async.parameter_sync_step
        assert config.data.train_batch_size == each_sync * steps


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_resolves_from_any_folder_and_leaves_nothing(
    script: Path, dry_run: Callable[..., Result], tmp_path: Path
) -> None:
    result = dry_run(script, "seed=3", f"output_dir={tmp_path}/a run", MODEL="some/model")
    assert list(tmp_path.iterdir()) == []
    assert only_misses_things(result), result.stderr
    assert "-m verl.trainer.main_ppo" in result.stdout
    assert "actor_rollout_ref.model.path=some/model" in result.stdout
    assert "data.seed=3" in result.stdout
    assert "verl accepts this configuration" in result.stdout


@pytest.mark.slow
def test_a_script_starts_the_program_beside_its_python() -> None:
    script = ROOT / "train/code_agent/rl/train_dapo_code_agent_tiny.sh"
    result = run_script(script, Path(sys.executable).parent, "--dry-run", MODEL="some/model")
    assert result.returncode == 1  # the data is not here
    assert "Traceback" not in result.stderr
    assert re.search(r"^error: this would not start: \S+\.parquet: no such file", result.stderr, re.MULTILINE)
    assert "verl accepts this configuration" in result.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_is_short_strict_and_says_how_it_is_used(script: Path, recorder: Path) -> None:
    result = run_script(script, recorder, "--dry-run", MODEL="")
    assert result.returncode == 1
    assert "set it to the folder of the SFT model, for example MODEL=" in result.stderr
    lines = script.read_text().splitlines()
    assert len(lines) < 40
    assert "set -euo pipefail" in lines
    assert any(line.startswith("# Usage:") for line in lines)
    assert lines[-1].startswith("exec ")
    assert script.stem.endswith("_tiny") or script.with_stem(f"{script.stem}_tiny").exists()
    subprocess.run([str(Path(sys.executable).parent / "shellcheck"), str(script)], check=True)


@pytest.mark.parametrize(
    "script",
    [*sorted((ROOT / "train").glob("*/[rs]*/*.sh")), *sorted((ROOT / "evaluation").rglob("*.sh"))],
    ids=lambda path: "-".join(path.relative_to(ROOT).parts),
)
def test_a_relative_model_starts_at_the_callers_folder_or_else_at_the_projects(
    script: Path, recorder: Path, tmp_path: Path
) -> None:
    def model_of(model: str, cwd: Path) -> Path:
        """The folder that the script's command finds for ``MODEL``."""
        done = run_script(script, recorder, cwd=cwd, MODEL=model, DATA_DIR="data", RANK="0")
        assert done.returncode == 0, done.stderr
        folder, *words = json.loads(done.stdout)
        [word] = [word for word in words if word.endswith(model)]
        return Path(folder, word.rpartition("=")[2])

    assert model_of("configs/rl", tmp_path) == ROOT / "configs/rl"
    (tmp_path / "configs/rl").mkdir(parents=True)
    assert model_of("configs/rl", tmp_path) == tmp_path / "configs/rl"
    assert model_of("configs/rl", ROOT) == ROOT / "configs/rl"
    assert model_of("Some/Model", tmp_path).parts[-2:] == ("Some", "Model")
    assert "# A relative MODEL starts at the caller's folder, or else at the project's" in script.read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "configs/rl").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_for_gpus_has_its_script_and_room_for_a_sample(path: Path) -> None:
    agent, method, _ = path.stem.split("_", 2)
    if agent in WORD_PROBLEMS:
        assert f"exec afm reproduce {agent} " in (ROOT / f"train/{agent}/all.sh").read_text()
    else:
        script = ROOT / f"train/{agent}_agent/rl/train_{method}_{agent}_agent.sh"
        assert f"configs/rl/{agent}_{method}_$SIZE.yaml" in script.read_text()
    settings, config = composed(path)
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.rollout.max_model_len >= longest
    assert config.critic.model.path == config.actor_rollout_ref.model.path
    if config.algorithm.adv_estimator == "gae":
        assert config.critic.ppo_max_token_len_per_gpu >= longest
    if method == "dapo":
        assert isinstance(settings.rewards, dict)
        overlong = settings.rewards["overlong"]  # the last eighth of the response
        assert overlong["max_tokens"] == settings.spec().limits.max_response_tokens
        assert overlong["buffer_tokens"] * 8 == overlong["max_tokens"]


def test_sglang_keeps_the_tokenizer_it_finds_stop_strings_with() -> None:
    one_line = "verl.actor_rollout_ref.rollout.name=sglang"
    _, config = composed(ROOT / "configs/rl/web_dapo_7b.yaml", one_line)
    assert config.actor_rollout_ref.rollout.name == "sglang"
    assert config.actor_rollout_ref.rollout.skip_tokenizer_init is False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "variables", "folder"),  # 7b is the default
    [
        ("code_agent", {"SIZE": "32b_long"}, "runs/code_agent_32b_rl"),
        ("code_agent_tiny", {"RECIPE": "code_dapo"}, "runs/tiny/rl_code"),
    ],
)
def test_every_size_and_recipe_of_the_code_agent_resolves(
    script: str, variables: dict[str, str], folder: str, dry_run: Callable[..., Result]
) -> None:
    result = dry_run(ROOT / f"train/code_agent/rl/train_dapo_{script}.sh", MODEL="m", **variables)
    assert "verl accepts this configuration" in result.stdout, result.stderr
    assert only_misses_things(result), result.stderr
    assert f"output in {folder}\n" in result.stdout


CLUSTER = ROOT / "train/ray_cluster.sh"


@pytest.mark.parametrize(
    ("words", "variables", "status", "message"),
    [
        (["both"], {}, 2, "got 'both'; usage: train/ray_cluster.sh head|node|status"),
        (["node"], {}, 1, "set it to the address of the head, for example HEAD=10.0.0.1:6379"),
        (["node"], {"HEAD": "10.0.0.1:6379"}, 1, "is missing: copy the token file of the head"),
        (["node"], {"HEAD": "10.0.0.1"}, 2, "HEAD=10.0.0.1: expected HOST:PORT"),
        (["head"], {"NODE_IP": "203.0.113.1"}, 1, "NODE_IP=203.0.113.1: not an address of this machine"),
        (["head"], {"PORT": "16379"}, 2, "PORT=16379: expected a port below 10001"),
        (["wait", "x"], {}, 2, "wait x: how many nodes to wait for?"),
        (["wait", "2"], {"WAIT_S": "abc"}, 2, "WAIT_S=abc: expected whole seconds, for example WAIT_S=600"),
        (["status"], {"HEAD": "127.0.0.1:1"}, 1, "no cluster answers at 127.0.0.1:1; start one"),
    ],
)
def test_the_cluster_script_says_what_is_missing(
    tmp_path: Path, words: list[str], variables: dict[str, str], status: int, message: str
) -> None:
    subprocess.run([str(Path(sys.executable).parent / "shellcheck"), str(CLUSTER)], check=True)
    variables |= {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    result = run_script(CLUSTER, Path(sys.executable).parent, *words, **variables)
    assert result.returncode == status
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "token").exists()


def test_the_cluster_script_names_a_port_in_use_and_a_head_that_is_not_there(tmp_path: Path) -> None:
    programs = Path(sys.executable).parent
    token = tmp_path / "token"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        head = run_script(
            CLUSTER, programs, "head", NODE_IP="127.0.0.1", PORT=str(port), RAY_AUTH_TOKEN_PATH=str(token)
        )
    assert head.stderr.startswith(f"error: port {port} is in use here")
    assert not token.exists()
    token.write_text("0" * 64)
    node = run_script(CLUSTER, programs, "node", HEAD=f"127.0.0.1:{port}", RAY_AUTH_TOKEN_PATH=str(token))
    assert node.stderr.startswith(f"error: HEAD=127.0.0.1:{port}: nothing answers there")


def test_waiting_for_nodes_shows_each_that_joins_and_names_a_head_that_is_not_there(tmp_path: Path) -> None:
    ray = tmp_path / "ray"
    variables = {"HEAD": "127.0.0.1:1", "WAIT_S": "1", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    ray.write_text("#!/bin/sh\necho ' 1 node_a'; [ -e \"$0.b\" ] && echo ' 1 node_b'; touch \"$0.b\"\n")
    ray.chmod(0o755)
    both = run_script(CLUSTER, tmp_path, "wait", "2", **variables | {"WAIT_S": "60"})
    waiting = "waiting up to 60 s for 2 nodes at 127.0.0.1:1\n"
    assert (both.returncode, both.stdout) == (
        0,
        f"{waiting}1 of 2 nodes have joined\n2 of 2 nodes have joined\n",
    )
    ray.write_text("#!/bin/sh\nexit 1\n")
    nobody = run_script(CLUSTER, tmp_path, "wait", "2", **variables)
    assert nobody.returncode == 1
    assert nobody.stderr.startswith(
        "error: no cluster answers at 127.0.0.1:1 after 1 s; check the terminal of its head"
    )


@pytest.mark.parametrize("command", ["head", "node"])
def test_a_start_that_times_out_is_one_line_with_the_next_step(tmp_path: Path, command: str) -> None:
    token, ray = tmp_path / "token", tmp_path / "ray"
    token.write_text("0" * 64)
    # What Ray 2.60 prints, shortened.
    ray.write_text(
        "#!/bin/sh\n[ $1 = start ] || exit 0\necho 'a warning' >&2\n"
        "printf 'Traceback (most recent call last):\\n  File \"node.py\", line 5\\n' >&2\n"
        "echo 'Exception: The current node timed out during startup.' >&2\nexit 1\n"
    )
    ray.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        own = {"HEAD": f"127.0.0.1:{port}"} if command == "node" else {"PORT": "9"}
        result = run_script(CLUSTER, tmp_path, command, RAY_AUTH_TOKEN_PATH=str(token), **own)
    assert result.returncode == 1
    warning, line = result.stderr.splitlines()
    assert warning == "a warning"
    assert line.startswith(
        "error: ray did not start: Exception: The current node timed out during startup; run `ray stop`"
    )
    assert line.endswith("then run the same command again")


@pytest.mark.parametrize("words", [["node"], ["status"], ["wait", "2"]])
def test_the_cluster_script_says_in_one_line_that_the_token_is_wrong(
    tmp_path: Path, words: list[str]
) -> None:
    token, ray = tmp_path / "token", tmp_path / "ray"
    token.write_text("0" * 64)
    # What Ray 2.60 prints, shortened. Its `start` repeats a warning for minutes.
    ray.write_text(
        "#!/bin/sh\n[ $1 = status ] || exit 3\necho 'Traceback (most recent call last):' >&2\n"
        "echo 'ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken: Authentication token is missing' >&2\nexit 1\n"
    )
    ray.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        result = run_script(CLUSTER, tmp_path, *words, HEAD=address, RAY_AUTH_TOKEN_PATH=str(token))
    assert result.returncode == 1
    assert result.stderr == (
        f"error: the cluster at {address} rejected the token in {token}; copy the token file of its head there\n"
    )
