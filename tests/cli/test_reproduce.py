import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import rehearsal as fixtures
from extras import needs
from typer.testing import CliRunner

from afm.agents import load_agent
from afm.cli.commands import app
from afm.cli.reproduce import _errors
from afm.cli.reproduce_stages import AGENTS, NAMES
from afm.cli.reproduce_word_problems import WORD_PROBLEMS, WordProblems
from afm.configuration import read_extended
from afm.datasets.hub_sets import read_hub_sets
from afm.errors import UsageError
from afm.evaluation.config import load_config as load_eval
from afm.trajectory.tags import author_segments
from afm.trajectory.validate import validate
from llamafactory_patch.config import resolve as resolve_sft
from verl_ext.settings import load_settings as load_rl

needs("pyarrow")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("SIZE", "FROM", "BENCHMARKS", "TINY", "ROOT"):
        monkeypatch.delenv(name, raising=False)


def reproduce(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["reproduce", *words])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("recipe", sorted((ROOT / "configs/rl").glob("*.yaml")), ids=lambda path: path.stem)
def test_reinforcement_asks_with_the_prompts_that_fine_tuning_trained(recipe: Path) -> None:
    agent, size = (
        recipe.stem.split("_")[0],
        recipe.stem.removesuffix("_long").removesuffix("_lora").rpartition("_")[2],
    )
    trained = read_extended(ROOT / f"configs/sft/{agent}_agent_qwen2.5_{size}.yaml", "an SFT recipe")
    asked = read_extended(recipe, "an RL recipe")
    assert trained.get("prompt", "own") == asked.get("prompt", "own")


@pytest.mark.parametrize("agent", ["web", "mhqa", "code"])
def test_fixtures_have_the_published_layouts_and_the_same_bytes_every_time(
    agent: str, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        listed = fixtures.make_repositories(agent, tmp_path / name, ROOT / "configs")
    files = [path for path in (tmp_path / "first").rglob("*") if path.is_file()]
    for path in files:
        twin = tmp_path / "second" / path.relative_to(tmp_path / "first")
        assert path.read_bytes() == twin.read_bytes()
    spec = load_agent(agent)
    [sft] = [path for path in files if path.name == "sft.json"]
    for row in json.loads(sft.read_text()):
        assert row["instruction"].startswith(fixtures._RULES[agent])
        solver = load_agent("math") if "boxed" in row["output"] else spec
        assert not validate(author_segments(row["output"], solver), solver), row["output"]
    published = read_hub_sets(ROOT / f"configs/data/{agent}_agent.yaml").sets
    made = read_hub_sets(listed).sets
    assert set(made) == {name for name, one in published.items() if not one.optional}
    for name, one in made.items():
        assert one.prepare == published[name].prepare
        assert [file.name for file in one.pinned] == [file.name for file in published[name].pinned]


@pytest.mark.parametrize("agent", AGENTS)
def test_a_dry_run_of_the_tiny_chain_prints_every_stage(agent: str, tmp_path: Path) -> None:
    status, printed, _ = reproduce(agent, "--tiny", "--dry-run", "--root", str(tmp_path), "rl.seed=3")
    assert status == 0
    assert [line[2:] for line in printed.splitlines() if line.startswith("# ")] == list(NAMES)
    [training] = [line for line in printed.splitlines() if f"train/{agent}/rl/" in line]
    words = shlex.split(training)
    assert f"train_files={tmp_path}/data/{agent}/rl/train.parquet" in words
    assert f"MODEL={tmp_path}/models/{agent}_tiny_sft" in words
    assert {"prompt=row", "seed=3"} <= set(words)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("name", "size"), [("svamp", "135m"), ("svamp", "1.5b"), ("gsm8k", "135m"), ("gsm8k", "1.5b")]
)
def test_a_road_of_word_problems_trains_on_what_it_prepared_and_tests_three_models(
    name: str, size: str, tmp_path: Path
) -> None:
    chosen = WORD_PROBLEMS[name]
    run = WordProblems(
        chosen, tmp_path, ROOT, size, False, ROOT / f"configs/data/{name}.yaml", ("rl.seed=3",)
    )
    stages = {stage.name: stage for stage in run.stages()}
    assert list(stages) == list(NAMES)
    made = {str(path) for path in stages["prepare"].makes}
    words = {name: [" ".join(command.words) for command in stage.commands] for name, stage in stages.items()}
    files = re.findall(r"(?:train|val)_files=(\S+)", " ".join(words["rl"]))
    assert set(files) <= made
    assert len(words["rl"]) == (2 if name == "gsm8k" else 1)
    assert all(line.endswith("rl.seed=3".removeprefix("rl.")) for line in words["rl"])
    asked = [re.search(r"model\.path=(\S+)", line)[1] for line in words["eval"]]  # type: ignore[index]
    assert asked == [str(run.base), str(run.sft_model), str(run.model)]
    before_eval = [line for stage in ("sft", "rl") for line in words[stage]]
    assert not any("/eval/" in line for line in before_eval)
    for command in (*stages["sft"].commands, *stages["rl"].commands, *stages["eval"].commands):
        config, *overrides = command.check
        load = {"sft": resolve_sft, "afm rl": load_rl, "eval": load_eval}
        kind = "afm rl" if command.words[1] == "rl" else command.words[1]
        load[kind](Path(config), overrides)


@pytest.mark.parametrize("has_instructions", [True, False])
def test_a_small_model_computes_in_bfloat16_where_the_processor_has_it(
    has_instructions: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("afm.memory_arithmetic", "afm.cli.reproduce_word_problems"):
        monkeypatch.setattr(f"{module}.multiplies_bfloat16", lambda: has_instructions)
    run = WordProblems(
        WORD_PROBLEMS["svamp"], tmp_path, ROOT, "135m", False, ROOT / "configs/data/svamp.yaml"
    )
    words = {stage.name: " ".join(stage.commands[-1].words) for stage in run.stages()}
    assert ("param_dtype=bf16" in words["rl"]) is has_instructions
    assert ("afm_cpu.dtype=bfloat16" in words["rl"]) is has_instructions
    assert ("model.dtype=bfloat16" in words["eval"]) is has_instructions


def test_the_scripts_hand_everything_to_the_command() -> None:
    for agent in (*AGENTS, *WORD_PROBLEMS):
        script = ROOT / f"train/{agent}/all.sh"
        assert script.read_text().rstrip().endswith(f'exec afm reproduce {agent} "$@"')
        assert os.access(script, os.X_OK)


@pytest.mark.slow
def test_what_no_stage_makes_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, _, errors = reproduce("web_agent", "--root", str(tmp_path), "--from", "rl")
    assert status == 1
    files = {"data/web_agent/rl/train.parquet": "prepare", "models/web_agent_7b_sft/config.json": "sft"}
    for file, stage in (files | {"data/web_agent/raw/prompts/web_agent.txt": "prepare"}).items():
        assert f"{tmp_path}/{file}: missing, stage {stage} makes it" in errors
    assert "prompt: got" not in errors
    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    check = [str(ROOT / "configs/tiny/eval/nq.yaml"), f"model.path={model}", f"data={data}"]
    monkeypatch.setenv("WIKI_RAG_SERVER_URL", "http://127.0.0.1:9")
    alone = list(_errors(Path(sys.executable), check, []))
    assert any(str(model) in text for text in alone)
    assert any(str(data) in text for text in alone)
    [rest] = _errors(Path(sys.executable), check, [model / "config.json", data])
    assert "no server answers at http://127.0.0.1:9" in rest


def test_a_judge_is_asked_for_before_there_are_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GRM_BASE_URL", raising=False)
    monkeypatch.setattr("afm.cli.reproduce._errors", lambda *_: iter(()))  # the doctor is asked above
    words = ("web_agent", "--root", str(tmp_path), "--dry-run", "eval.rewards.judge.url=http://127.0.0.1:9")
    status, shown, errors = reproduce(*words)
    assert status == 1
    notes = [line[2:].split(":")[0] for line in shown.splitlines() if line.startswith("# ")]
    checks = [f"checking {name}" for name in ("sft", "rl", "eval")]
    assert notes == [*NAMES, *checks, "not checked"], "every command is shown before the first check"
    assert shown.rstrip().endswith("/data/web_agent/raw --dry-run")
    assert "rl: judge: no endpoint; set GRM_BASE_URL" in errors
    assert "eval: judge:" not in errors
    monkeypatch.setenv("GRM_BASE_URL", "http://127.0.0.1:9/v1")
    assert "rl: judge: no answer from http://127.0.0.1:9/v1" in reproduce(*words)[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["web"], "expected one of: code_agent, gsm8k, mhqa_agent, svamp, web_agent"),
        (["web_agent", "--size", "3b"], "web_agent is published in other sizes; expected 7b or 32b"),
        (["svamp", "--tiny"], "is not for svamp; --size 135m runs on a CPU"),
        (["mhqa_agent", "--from", "evall"], "did you mean 'eval'"),
        (["mhqa_agent", "seed=3"], "expected sft.KEY=VALUE, rl.KEY=VALUE or eval.KEY=VALUE"),
        (["mhqa_agent", "--benchmarks", "gaia", "--dry-run"], "gaia is not a benchmark of mhqa_agent"),
    ],
)
def test_wrong_words_are_told(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["reproduce", *words])
    assert isinstance(result.exception, UsageError)
    assert message in str(result.exception)


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.parametrize("agent", sorted(AGENTS))
def test_the_whole_chain_runs_on_a_cpu_and_resumes_after_a_kill(
    agent: str, tmp_path: Path, kill_when: Callable[..., None]
) -> None:
    if agent != "code_agent" and "AFM_ALL_AGENTS" not in os.environ:
        pytest.skip("on demand: set AFM_ALL_AGENTS=1; benchmarks/README.md has a record")
    pytest.importorskip("llamafactory")
    pytest.importorskip("verl")
    command = [str(ROOT / f"train/{agent}/all.sh")]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "TINY": "1", "ROOT": str(tmp_path), "PYTHONPATH": str(ROOT)}
    trained = tmp_path / f"models/{agent}_tiny_sft"
    kill_when(command, lambda: (trained / "checkpoint-40/trainer_state.json").exists(), env=env)
    lock = (tmp_path / f"data/{agent}/raw/download.lock.json").read_bytes()
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "nothing to fetch" in done.stdout
    assert "(made before)" in done.stdout
    assert (tmp_path / f"data/{agent}/raw/download.lock.json").read_bytes() == lock
    results = tmp_path / f"runs/{agent}_tiny"
    report = (results / "report.md").read_text()
    observed = 0
    for benchmark in AGENTS[agent].tiny_benchmarks:
        episodes = (results / f"eval_{benchmark}/episodes.jsonl").read_text().splitlines()
        ids = [json.loads(line)["id"] for line in episodes]
        assert len(ids) == len(set(ids)) == 8
        assert benchmark.replace("_", "\\_") in report  # as Markdown escapes it
        observed += sum(json.loads(line)["cost"]["observation_tokens"] for line in episodes)
    assert observed > 0
    rows = [json.loads(line) for line in (trained / "trainer_log.jsonl").read_text().splitlines()]
    steps = [row["current_steps"] for row in rows if "loss" in row]
    assert steps == list(range(1, 81))
    before = (results / "report.json").stat().st_mtime_ns
    again = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "already trained for 2 steps" in again.stdout
    assert (results / "report.json").stat().st_mtime_ns > before
