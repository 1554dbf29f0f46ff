"""`afm doctor` of reinforcement learning: every recipe on its hardware, and the findings about wrong recipes."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from extras import needs
from typer.testing import CliRunner

from afm.agents import load_agent
from afm.cli.commands import app
from afm.datasets import Task
from afm.datasets.rl_files import write_rl
from afm.findings import Finding, Level
from afm.memory_arithmetic import recipe_hardware
from afm.models.tiny import train_tokenizer
from verl_ext.doctor import AskedHardware, diagnose

needs("verl")

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs/rl").glob("*.yaml"))
WEB = ROOT / "configs/rl/web_dapo_7b.yaml"
TINY = sorted((ROOT / "configs/tiny/rl").glob("*.yaml"))
JUDGE = "rewards.judge.url=http://127.0.0.1:1/v1"
SHAPES = {  # the published config.json of Qwen2.5
    "1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
             "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True},
    "3b": {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
           "intermediate_size": 11008, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
           "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False},
    "32b": {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
            "intermediate_size": 27648, "vocab_size": 152064, "tie_word_embeddings": False},
}  # fmt: skip
SOURCES = {"web": "search", "code": "codecontests", "mhqa": "nq", "math": "gsm8k"}
AGENTS = {"svamp": "math", "gsm8k": "math"}
"""Agents of recipes that are named after their questions."""

WITHOUT_PACKAGES = not any(
    importlib.util.find_spec(name) for name in ("flash_attn", "cupy", "vllm", "sglang")
)

Look = Callable[..., list[Finding]]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that knows the agents' prompts, so that they are about as short as for a large one."""
    folder = tmp_path_factory.mktemp("words")
    prompts = [load_agent(agent).user_message("What is 12?") for agent in SOURCES]
    train_tokenizer(prompts * 3, folder, vocab_size=1500)
    return folder


@pytest.fixture
def look(tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Run the doctor on a configuration with existing data and a model of a given shape."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", str(tmp_path))  # without nvidia-smi
    for variable in ("GRM_BASE_URL", "GRM_API_KEY", "WANDB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)

    def diagnosed(config: Path, *overrides: str, size: str = "7b", asked: AskedHardware | None = None) -> Any:
        first, tiny = config.stem.split("_")[0], config in TINY
        agent = AGENTS.get(first, first)
        gold = {"inputs": ["1\n"], "outputs": ["1\n"]} if agent == "code" else "1"
        tasks = [
            Task(id=str(number), question=f"What is {number}?", ground_truth=gold, data_source=SOURCES[agent])
            for number in range(600)
        ]
        write_rl(tasks, load_agent(agent), tmp_path / "rl.parquet")
        files = ("train_files",) if tiny else ("train_files", "val_files")
        usual = [f"{key}={tmp_path}/rl.parquet" for key in files]
        usual += [f"model={model(size)}", f"output_dir={tmp_path}/out"] + [JUDGE] * (agent == "web")
        return diagnose(config, [*usual, *overrides], asked or AskedHardware(), {})

    def model(size: str) -> Path:
        folder = tmp_path / size
        if not folder.exists():
            shutil.copytree(words, folder)
            kind = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
            kind |= {"max_position_embeddings": 32768} | SHAPES[size]
            (folder / "config.json").write_text(json.dumps(kind), encoding="utf-8")
            (folder / "model.safetensors").touch()
        return folder

    return diagnosed


def of(findings: list[Finding], level: Level) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = defaultdict(list)
    for finding in findings:
        if finding.level is level:
            texts[finding.subject].append(finding.text)
    return dict(texts)


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_passes_on_the_hardware_it_names(look: Look, path: Path) -> None:
    meant = recipe_hardware(path)
    assert meant is not None
    findings = look(path, size=path.stem.split("_")[2], asked=AskedHardware(gpu_gib=meant.gpu_gib))
    errors, warnings, sound = (of(findings, level) for level in (Level.ERROR, Level.WARNING, Level.OK))
    assert errors.keys() <= {"disk", "packages"}  # of the computer that tests, not of the one that trains
    assert not {"memory", "overlong", "filter"} & warnings.keys()
    assert sound["hardware"] == [str(meant)]
    assert sound["engine"] == ["verl's own validation accepts the configuration"]
    assert {"splits", "batch", "context", "kv cache", "ids", "steps"} <= set(sound)
    assert not [text for text in warnings.get("hardware", ()) if "header" in text]
    if WITHOUT_PACKAGES:
        engine, text = warnings["packages"]
        begin = "on the training machine: "
        assert engine.startswith(f"{begin}vllm is not installed: rollout.name requires it; ")
        assert text.startswith(f"{begin}flash_attn is not installed: ")
        assert "build flash-attn 2.8.3 with nvcc" in text


ABSENT = pytest.mark.skipif(not WITHOUT_PACKAGES, reason="a GPU environment")


@pytest.mark.slow
@ABSENT
def test_on_a_machine_with_a_gpu_missing_packages_are_errors(
    look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    separate = tmp_path / "web_separate_7b.yaml"
    separate.write_text(f"extends: [{WEB}, {ROOT}/configs/rl/async/separate.yaml]\n", encoding="utf-8")
    _, flash, cupy = of(look(separate), Level.ERROR)["packages"]
    assert flash.startswith("flash_attn is not installed: verl asks for flash_attention_2")
    assert cupy.startswith(
        "cupy is not installed: rollout.checkpoint_engine.backend=nccl sends weights with it"
    )


@pytest.mark.slow
@ABSENT
def test_other_attention_needs_no_flash_attn_unless_there_is_a_critic(look: Look) -> None:
    attention = "verl.actor_rollout_ref.model.+override_config.attn_implementation=sdpa"
    web = look(WEB, attention)
    assert "keys" in of(web, Level.OK)
    assert ["vllm" in text for text in of(web, Level.WARNING)["packages"]] == [True]
    critic = of(look(ROOT / "configs/rl/mhqa_ppo_7b.yaml", attention), Level.WARNING)["packages"]
    assert "its critic has no other choice" in critic[1]


@pytest.mark.slow
@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_a_tiny_twin_passes_and_has_no_gpu_to_speak_of(look: Look, path: Path) -> None:
    findings = look(path)
    subjects = {finding.subject for finding in findings}
    assert {"kv cache", "packages"}.isdisjoint(subjects)
    assert "memory" in subjects
    assert "GPU" not in of(findings, Level.OK)["hardware"][0]
    assert set(of(findings, Level.ERROR)) <= {"disk", "memory", "prompts", "teacher"}
    assert of(findings, Level.OK)["engine"] == ["verl's own validation accepts the configuration"]


@pytest.mark.slow
def test_what_is_asked_for_is_what_is_divided(look: Look) -> None:
    findings = look(WEB, asked=AskedHardware(nodes=1, gpus=6))
    assert of(findings, Level.OK)["hardware"] == ["1 node x 6 GPUs of 80 GiB"]
    errors = of(findings, Level.ERROR)
    assert "6 GPUs are not divisible by rollout.tensor_model_parallel_size x data" in errors["splits"][0]
    assert "is not divisible by 3 data ranks" in errors["batch"][0]


@pytest.mark.slow
def test_a_gpu_too_small_and_hardware_other_than_the_headers_are_told_with_a_way_out(look: Look) -> None:
    findings = look(WEB, "verl.trainer.nnodes=4", asked=AskedHardware(gpu_gib=12.2))
    warnings = of(findings, Level.WARNING)
    [warning] = [text for text in warnings["memory"] if text.startswith("actor update")]
    assert (
        "more than 11.2 GiB (92% of the 12.2 GiB of a GPU); model.use_fused_kernels=true, lower ppo_max_token_len_per_gpu"
        in warning
    )
    assert "0 episodes of full length at once" in of(findings, Level.ERROR)["kv cache"][0]
    assert warnings["addresses"][-1].startswith(
        "judge: http://127.0.0.1:1/v1 is another server on each of the 4"
    )
    assert warnings.get("sandbox") is None
    header, cluster = warnings["hardware"]
    assert header.startswith("the recipe's header says 2 nodes x 8 GPUs of 80 GiB")
    assert "add ray_address=HOST:PORT" in cluster
    [programs] = of(look(ROOT / "configs/rl/code_dapo_32b.yaml", size="32b"), Level.WARNING)["sandbox"]
    assert programs.startswith("programs of code and code_tests run on each of the ")
    joined = look(WEB, "ray_address=h:1", "model=models/nothing")
    assert "hardware" not in of(joined, Level.WARNING)
    assert "no estimate" in of(joined, Level.WARNING)["memory"][0]


@pytest.mark.parametrize(
    ("override", "subject", "message"),
    [
        ("agent=wbe", "agent", "did you mean 'web'?"),
        ("verl.data.train_bach_size=1", "keys", "did you mean 'train_batch_size'?"),
        ("verl.trainer.nnodes=0", "batch", "verl.trainer.nnodes: got 0, expected a positive whole number"),
        ("rewards.formula=correct * fast", "rewards", "formula"),
    ],
)  # fmt: skip
def test_what_ends_the_look_is_an_error_that_says_why(
    look: Look, override: str, subject: str, message: str
) -> None:
    errors = of(look(WEB, override), Level.ERROR)
    assert any(message in text for text in errors[subject]), errors


FAULTS = {  # a setting, the finding's subject, and what it says
    "tools=configs/tools/wiki_rag.yaml": (
        "tools",
        "calls ['crawl_page', 'web_search'], which are not declared there",
    ),
    "rewards.judge.url=": ("judge", "no sample of these rows gets a score"),
    "verl.actor_rollout_ref.actor.loss_agg_mode=mean": ("algorithm", "loss_agg_mode: got 'mean'"),
    "verl.data.train_batch_size=1000": ("steps", "600 rows, fewer than a batch"),
    "verl.data.max_prompt_length=16": ("prompts", "at least 256 rows are too long"),
    "output_dir=configs/rl/web_dapo_7b.yaml/out": ("output", "web_dapo_7b.yaml is not writable"),
    "val_files=nowhere.parquet": ("data", "nowhere.parquet: no such file"),
}


@pytest.mark.slow
def test_everything_else_that_would_fail_is_said_at_once(look: Look) -> None:
    errors = of(look(WEB, *FAULTS), Level.ERROR)
    batch = ("batch", "expected a multiple"), ("engine", "verl rejects the configuration")
    for subject, text in (*FAULTS.values(), *batch):
        assert any(text in error for error in errors[subject]), errors


@pytest.mark.slow
def test_a_run_that_its_epochs_end_early_is_a_warning_and_an_unclear_question_one_error(
    look: Look, tmp_path: Path
) -> None:
    row = {"prompt": [{"role": "user", "content": "Answer.\n\nTask: a\nTask: b"}], "data_source": "search"}
    row |= {"reward_model": {"ground_truth": "1"}, "extra_info": {"index": "x"}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "unclear.parquet")
    sizes = ("prompt=own", "verl.data.train_batch_size=256", "verl.trainer.total_epochs=3")
    findings = look(
        WEB, *sizes, "verl.trainer.total_training_steps=7", f"val_files={tmp_path}/unclear.parquet"
    )
    assert of(findings, Level.WARNING)["steps"] == [
        "trainer.total_training_steps=7, but trainer.total_epochs=3 ends the run after 6; "
        "set verl.trainer.total_epochs=4, or add rows"
    ]
    [prompts] = of(findings, Level.ERROR)["prompts"]
    assert prompts.startswith("val_files: 1 row may get only a part of their question: unclear.parquet:1")
    assert "steps" not in of(look(WEB, *sizes, "verl.trainer.total_training_steps=6"), Level.WARNING)


@pytest.mark.slow
def test_a_model_that_is_not_whole_is_an_error(look: Look, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    half = of(look(WEB, f"model={tmp_path}/half"), Level.ERROR)
    assert half["model"] == [
        f"{tmp_path}/half: lacks config.json (config.json), weights (*.safetensors or "
        "pytorch_model*.bin), tokenizer (tokenizer.json or tokenizer.model or vocab.json); expected a complete model"
    ]
    named = look(WEB, "model=Qwen/Qwen2.5-7B-Instruct")
    assert "no such folder here" in of(named, Level.WARNING)["model"][0]
    assert "memory" in of(named, Level.OK)


@pytest.mark.slow
def test_trackers_without_a_key_are_offline(look: Look) -> None:
    texts = of(look(TINY[0], "trackers=[wandb, tensorboard]"), Level.OK)["trackers"]
    assert texts == ["wandb: offline, because WANDB_API_KEY is not set"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"extends: {ROOT}/configs/rl/code_dapo_7b.yaml\nsedd: 1\n", "sedd: unknown key; did you mean 'seed'?"),
        ("agent: web\n", "found none of them; it has ['agent']"),
        ("train_files: a\ndataset: b\n", "both 'train_files' of an `afm rl` file and 'dataset' of an `afm sft` file"),
    ],
)  # fmt: skip
def test_the_command_tells_the_two_kinds_of_training_apart_by_their_content(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "mine.yaml").write_text(text, encoding="utf-8")
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "sft" / "mine.yaml")])
    assert result.exit_code == 1
    assert message in f"{result.output} {result.exception}"
