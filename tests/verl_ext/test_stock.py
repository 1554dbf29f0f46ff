"""Stock verl with its own configuration and data format, and our loop, tools and reward turned on one by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from extras import needs
from reciting import learn_by_heart

from afm.models.tiny import create_tiny_model, train_tokenizer
from afm.processes import tied_environment
from verl_ext.command import environment, ray_overrides
from verl_ext.compose import arguments, compose, default_overrides
from verl_ext.processes import Process, descendants, end, scratch_folder
from verl_ext.settings import RlSettings

needs("verl")

ROOT = Path(__file__).resolve().parents[2]
ROLLOUT = "actor_rollout_ref.rollout"
SECONDS = 600
PROGRAM = "```py\nprint(12+13)\n```"
LOOP = {"agent_name": "afm_agent", "question": "12+13?"}
TOOL = {"agent_name": "tool_agent", "question": "Call: 12+13?"}
PLAIN = {"agent_name": "single_turn_agent", "question": "Say: 12+13?"}


def said(text: str, by_model: bool = True) -> tuple[str, bool]:
    return text, by_model


def asked(question: str) -> tuple[str, bool]:
    return said(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", False)


CALL = json.dumps({"name": "code", "arguments": {"code": PROGRAM}})
TEXTS = [
    [
        asked(LOOP["question"]),
        said(f"<plan>Run it.</plan><think>12+13.</think><code>\n{PROGRAM}\n</code>"),
        said("\n<observation>\n25\n</observation>\n", False),
        said("<reflection>25.</reflection><think>Done.</think><answer>\\boxed{25}</answer>"),
    ],
    [
        asked(TOOL["question"]),
        said(f"<tool_call>\n{CALL}\n</tool_call><|im_end|>"),
        said("\n<|im_start|>tool\n25<|im_end|>\n<|im_start|>assistant\n", False),
        said("<plan>Say it.</plan><think>Done.</think><answer>\\boxed{25}</answer><|im_end|>"),
    ],
    [
        asked(PLAIN["question"]),
        said("<plan>Add.</plan><think>Easy.</think><answer>\\boxed{25}</answer><|im_end|>"),
    ],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned the format of each of the three loops by heart."""
    folder = tmp_path_factory.mktemp("reciting")
    train_tokenizer(["".join(piece for piece, _ in text) for text in TEXTS] * 5, folder, vocab_size=320)
    create_tiny_model(folder, folder, hidden_size=64, layers=2, heads=4, mlp=128)
    learn_by_heart(folder, TEXTS)
    return folder


def write_rows(path: Path, *kinds: dict[str, str]) -> None:
    """Write rows like those of verl's examples. verl's own reward knows their ``data_source``."""
    import pyarrow as pa
    import pyarrow.parquet

    rows = [
        {
            "data_source": "openai/gsm8k",
            "agent_name": kinds[number % len(kinds)]["agent_name"],
            "prompt": [{"role": "user", "content": kinds[number % len(kinds)]["question"]}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "25"},
            "extra_info": {"split": "train", "index": number},
        }
        for number in range(6)
    ]
    pa.parquet.write_table(pa.Table.from_pylist(rows), path)


def stock(folder: Path, model: Path) -> dict[str, Any]:
    """Return the keys of verl's examples (GRPO on GSM8K) with small sizes."""
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": str(folder / "train.parquet"),
        "data.val_files": str(folder / "train.parquet"),
        "data.train_batch_size": 6,
        "data.max_prompt_length": 64,
        "data.max_response_length": 256,
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 6,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 12,
        "actor_rollout_ref.actor.use_kl_loss": False,
        f"{ROLLOUT}.n": 2,
        f"{ROLLOUT}.temperature": 0.1,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 12,
        "reward.num_workers": 1,
        "trainer.logger": ["console", "file"],
        "trainer.val_before_train": False,
        "trainer.total_training_steps": 1,
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "hydra.run.dir": str(folder / "hydra"),
    }


def our_loop(folder: Path) -> dict[str, Any]:
    settings = {
        "agent": str(ROOT / "configs/tiny/agents/math.yaml"),
        "tools": str(ROOT / "configs/tools/code_executor.yaml"),
    }
    entry = {"name": "afm_agent", "_target_": "verl_ext.agent_loop.AfmAgentLoop"}
    entry["settings"] = str(folder / "afm.yaml")
    (folder / "afm.yaml").write_text(yaml.safe_dump(settings))
    (folder / "loops.yaml").write_text(yaml.safe_dump([entry]))
    return {f"{ROLLOUT}.agent.agent_loop_config_path": str(folder / "loops.yaml")}


def our_tools(folder: Path) -> dict[str, Any]:
    config = {"type": "native", "tools": str(ROOT / "configs/tools/code_executor.yaml")}
    entry = {"class_name": "verl_ext.stock.AfmTool", "config": config}
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    return {f"{ROLLOUT}.multi_turn.tool_config_path": str(folder / "tools.yaml")}


def our_reward(folder: Path) -> dict[str, Any]:
    # The form of a text is judged by an agent's rules; verl's own loops have none.
    (folder / "rewards.yaml").write_text("formula: correct\n")
    key = "reward.custom_reward_function"
    return {
        f"{key}.path": "pkg://verl_ext.stock",
        f"+{key}.reward_kwargs.rewards": str(folder / "rewards.yaml"),
    }


def cpu(folder: Path, model: Path, scratch: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keys and variables that `afm rl` sets on a machine without an accelerator."""
    common = {"agent": "math", "model": str(model), "output_dir": folder, "train_files": ["unused"]}
    on_cpu, on_gpu = (RlSettings.model_validate({**common, "platform": name}) for name in ("cpu", "gpu"))
    usual = default_overrides(on_gpu)
    keys = {key: value for key, value in default_overrides(on_cpu).items() if key not in usual}
    return keys | ray_overrides(on_cpu, str(scratch)), environment(on_cpu)


def finished(words: list[str], variables: dict[str, str]) -> tuple[int, str]:
    """Return exit status and output of a run, and end everything that it started."""
    process = subprocess.Popen(
        words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=variables
    )
    family: set[Process] = set()
    watcher = threading.Timer(SECONDS, lambda: (family.update(descendants(process.pid)), process.kill()))
    watcher.start()
    output, _ = process.communicate()
    watcher.cancel()
    end(family)
    return process.returncode, output


def train(folder: Path, model: Path, *switches: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Run one step of ``verl.trainer.main_ppo``, and return its metrics and output."""
    with scratch_folder() as scratch:
        keys, variables = cpu(folder, model, scratch)
        overrides = stock(folder, model) | keys
        for switch in switches:
            overrides |= switch
        variables["VERL_FILE_LOGGER_PATH"] = str(folder / "metrics.jsonl")
        words = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments(overrides)]
        status, output = finished(words, tied_environment() | variables)
    assert status == 0, output[-8000:]
    [line] = (folder / "metrics.jsonl").read_text().splitlines()
    return dict(json.loads(line)["data"]), output


SWITCHES = {"loop": our_loop, "tools": our_tools, "reward": our_reward}


def test_verl_finds_our_reward_and_our_tools(tmp_path: Path) -> None:
    import asyncio

    from verl.tools.tool_registry import load_all_tools
    from verl.trainer.ppo.reward import get_custom_reward_fn

    config = compose({f"{ROLLOUT}.name": "vllm"} | our_reward(tmp_path) | our_tools(tmp_path))
    score = get_custom_reward_fn(config)
    text = "<plan>Add.</plan><think>Easy.</think><answer>\\boxed{25}</answer>"
    judged = asyncio.run(score(data_source="openai/gsm8k", solution_str=text, ground_truth="25"))
    assert judged["score"] == 1.0
    [tool] = load_all_tools(config.actor_rollout_ref.rollout.multi_turn.tool_config_path, None)
    assert tool.name == "code"


ONE_BY_ONE = pytest.mark.skipif(
    "AFM_EVERY_SWITCH" not in os.environ,
    reason="AFM_EVERY_SWITCH=1 trains with each switch alone, a minute each",
)


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("kinds", "names", "score", "turns"),
    [
        pytest.param([PLAIN], [], 0.0, 2, marks=ONE_BY_ONE, id="stock"),
        pytest.param([LOOP], ["loop"], 1.0, 4, marks=ONE_BY_ONE, id="loop"),
        pytest.param([TOOL], ["tools"], 0.0, 4, marks=ONE_BY_ONE, id="tools"),
        pytest.param([PLAIN], ["reward"], 1.0, 2, marks=ONE_BY_ONE, id="reward"),
        pytest.param([LOOP, TOOL, PLAIN], ["loop", "tools", "reward"], 1.0, 10 / 3, id="all"),
    ],
)
def test_stock_verl_trains_with_what_is_switched_on(
    tmp_path: Path, model: Path, kinds: list[dict[str, str]], names: list[str], score: float, turns: float
) -> None:
    """verl's own reward expects ``#### 25``, so it scores 0. Each tool call adds two turns."""
    write_rows(tmp_path / "train.parquet", *kinds)
    metrics, output = train(tmp_path, model, *(SWITCHES[name](tmp_path) for name in names))
    assert metrics["critic/score/mean"] == pytest.approx(score)
    assert metrics["num_turns/mean"] == pytest.approx(turns)
    assert ("Runs a Python program" in output) == ("tools" in names)
