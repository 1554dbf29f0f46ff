"""Measure how much of the tools' time a rollout hides, against verl's own loop and a turn-by-turn loop.

    .venv/bin/python benchmarks/bench_rollout.py --out rollout.json

verl's ``AgentLoopManager`` with its worker, client and load balancer runs 64 episodes on our CPU engine. Each has three tool
calls of 0.2 to 2 seconds. A tiny model recites the episodes. Each round runs, one after another:
- ours: all 64 episodes with our agent loop;
- ``tool_agent``: the same with verl's stock loop;
- turn by turn: ours, but the calls of a turn begin when all episodes have made theirs, and end together;
- generation alone: ours with tools that take no time;
- slowest alone: only the episode whose tools take longest.
The target is at most 1.15 times the longer of the last two. The default model is the smallest that can recite, and its steps
are short compared with the tools, as on a GPU. With ``--size quickstart``, generation alone takes about as long as the
slowest episode, which shows the cost of smaller batches on a CPU. First checks that every way makes the same calls and
samples the same tokens, except for the end of turn that the stock loop needs after each call.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from reciting import learn_by_heart
from timing import REPO, environment, interleaved, report
from waiting_tool import wait_s

TARGET = 1.15
EPISODES, CALLS = 64, 3
PROMPT_TOKENS, RESPONSE_TOKENS = 64, 640
AGENT = {
    "name": "waiting",
    "roles": {
        "think": {"kind": "thought"},
        "tool_call": {"kind": "tool", "tool": "wait"},
        "observation": {"kind": "observation"},
        "answer": {"kind": "answer"},
    },
    "transitions": {"start": ["tool_call"], "tool_call": ["tool_call", "answer"]},
    "prompt": "",
    "question_format": "{question}",
    "limits": {"max_response_tokens": RESPONSE_TOKENS},
}
SIZES: dict[str, dict[str, int]] = {
    "small": {"hidden_size": 64, "layers": 2, "heads": 2, "mlp": 192},
    "quickstart": {},
}
THOUGHT = "The next thing to do is to wait once more, then look at what came back, and only then go on to what follows."
WAYS: dict[str, dict[str, Any]] = {
    "ours": {"together": 1},
    "turn by turn": {"together": EPISODES},
    "generation alone": {"share": 0.0},
}


def question(episode: int) -> str:
    """Return a question that names the episode, from which the tool derives its time."""
    return f"Episode {episode}: wait."


def recitation(episode: int, *, stock: bool) -> list[tuple[str, bool]]:
    """Return an episode in the pieces that a loop assembles; ``True`` marks those of the model."""
    end = "<|im_end|>" if stock else ""
    pieces = [(f"<|im_start|>user\n{question(episode)}<|im_end|>\n<|im_start|>assistant\n", False)]
    for turn in range(CALLS):
        call = f'{{"name": "wait", "arguments": {{"turn": "{turn}"}}}}'
        pieces.append((f"<think>{THOUGHT}</think><tool_call>{call}</tool_call>{end}", True))
        seen = (
            f"\n<|im_start|>tool\nwaited {turn}<|im_end|>\n<|im_start|>assistant\n"
            if stock
            else f"\n<observation>\nwaited {turn}\n</observation>\n"
        )
        pieces.append((seen, False))
    return [*pieces, (f"<think>{THOUGHT}</think><answer>done</answer>{end}", True)]


def make_model(folder: Path, size: str) -> None:
    """Make a model that recites; it learns some episodes, which is enough for all numbers."""
    from afm.models.tiny import create_tiny_model, train_tokenizer

    texts = [recitation(episode, stock=stock) for episode in (7, 23, 38, 56) for stock in (False, True)]
    train_tokenizer(("".join(piece for piece, _ in text) for text in texts), folder, vocab_size=300)
    create_tiny_model(folder, folder, **SIZES[size])
    learn_by_heart(folder, texts)


def tool_file(folder: Path, name: str, config: dict[str, Any]) -> str:
    """Write a tools YAML with the waiting tool."""
    schema = {
        "name": "wait",
        "description": "Waits.",
        "parameters": {"type": "object", "properties": {"turn": {"type": "string"}}, "required": ["turn"]},
    }
    entry = {"class_name": "waiting_tool.WaitTool", "config": config, "tool_schema": {"function": schema}}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"tools": [entry]}))
    return str(path)


def write_loops(folder: Path, episodes: int) -> dict[str, Any]:
    """Write the agent loops of all ways; return verl's keys for them."""
    (folder / "agent.yaml").write_text(yaml.safe_dump(AGENT))
    loops = []
    for way, config in WAYS.items():
        name = way.replace(" ", "_")
        given = {key: min(value, episodes) for key, value in config.items()}
        settings = {
            "agent": str(folder / "agent.yaml"),
            "tools": tool_file(folder, f"tools_{name}", given),
            "rewards": {"formula": "format"},
        }
        (folder / f"settings_{name}.yaml").write_text(yaml.safe_dump(settings))
        target = "verl_ext.agent_loop.AfmAgentLoop"
        loops.append({"name": way, "_target_": target, "settings": str(folder / f"settings_{name}.yaml")})
    (folder / "loops.yaml").write_text(yaml.safe_dump(loops))
    config = {"type": "native", "tools": tool_file(folder, "tools_stock", {})}
    entry = {"class_name": "verl_ext.stock.AfmTool", "config": config}
    (folder / "stock_tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    rollout = "actor_rollout_ref.rollout"
    return {
        f"{rollout}.agent.agent_loop_config_path": str(folder / "loops.yaml"),
        f"{rollout}.multi_turn.tool_config_path": str(folder / "stock_tools.yaml"),
        f"{rollout}.temperature": 0.0,
    }


class Rollout:
    """verl's agent loop manager with our engine, in its own Ray."""

    def __init__(self, folder: Path, model: Path, scratch: Path, episodes: int, processes: int) -> None:
        from verl_ext.command import environment as run_environment
        from verl_ext.command import ray_overrides
        from verl_ext.compose import compose, overrides_of
        from verl_ext.settings import RlSettings

        settings = RlSettings.model_validate(
            {
                "agent": "math",
                "model": str(model),
                "output_dir": str(folder / "out"),
                "train_files": ["none.parquet"],
                "limits": {"max_response_tokens": RESPONSE_TOKENS},
                "platform": "cpu",
                "verl": {
                    "data": {"max_prompt_length": PROMPT_TOKENS},
                    "actor_rollout_ref": {
                        "rollout": {"+engine_kwargs": {"afm_cpu": {"processes": processes, "threads": 1}}}
                    },
                },
            }
        )
        os.environ.update(run_environment(settings))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(REPO / "benchmarks"), str(REPO)])
        overrides = overrides_of(settings, ray_overrides(settings, str(scratch)))
        self._config = compose(overrides | write_loops(folder, episodes))
        self._manager = self._start()

    def _start(self) -> Any:
        import ray
        from omegaconf import OmegaConf
        from verl.experimental.agent_loop.agent_loop import AgentLoopManager
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.rollout.llm_server import LLMServerClient
        from verl.workers.rollout.router import get_router_handle

        from verl_ext.engines import CpuOptions
        from verl_ext.rollout_cpu import CpuServer

        options: Any = OmegaConf.to_container(self._config.ray_kwargs.ray_init)
        options.pop("runtime_env", None)
        ray.init(**options, log_to_driver=False)
        parts = self._config.actor_rollout_ref
        rollout = omega_conf_to_dataclass(parts.rollout)
        start = ray.remote(CpuServer).options(num_cpus=0, max_concurrency=1000).remote
        processes = CpuOptions.of(rollout).processes
        servers = {
            str(number): start(rollout, omega_conf_to_dataclass(parts.model), number)
            for number in range(processes)
        }
        ray.get([server.ready.remote() for server in servers.values()])
        client = LLMServerClient(self._config, load_balancer_handle=get_router_handle(servers))
        return AgentLoopManager.create(self._config, llm_client=client)

    def run(self, way: str, episodes: Sequence[int]) -> list[dict[str, int]]:
        """Roll out; return facts about each episode."""
        import numpy as np
        from verl.protocol import DataProto

        def column(values: Sequence[Any]) -> Any:
            array: Any = np.empty(len(values), dtype=object)
            for at, value in enumerate(values):  # NumPy would unpack the lists of a slice
                array[at] = value
            return array

        rows: dict[str, list[Any]] = {
            "raw_prompt": [[{"role": "user", "content": question(episode)}] for episode in episodes],
            "agent_name": [way] * len(episodes),
            "uid": [str(episode) for episode in episodes],
            "index": list(episodes),
            "data_source": ["nq"] * len(episodes),
            "reward_model": [{"ground_truth": "done"}] * len(episodes),
        }
        batch = DataProto(non_tensor_batch={key: column(values) for key, values in rows.items()})
        found = self._manager.generate_sequences(batch)
        sampled = found.batch["response_mask"].sum(dim=1).tolist()
        turns = found.non_tensor_batch["__num_turns__"].tolist()
        return [{"sampled": a, "turns": b} for a, b in zip(sampled, turns, strict=True)]


def check(rollout: Rollout, episodes: Sequence[int]) -> dict[str, Any]:
    """Check that all ways do the same work.

    Raises:
        SystemExit: They do not.
    """
    found = {
        way: rollout.run(way, episodes) for way in ("ours", "turn by turn", "generation alone", "tool_agent")
    }
    per_episode = {way: {tuple(fact.values()) for fact in facts} for way, facts in found.items()}
    [(sampled, turns)] = per_episode["ours"] if len(per_episode["ours"]) == 1 else [(0, 0)]
    wanted = {way: {(sampled, turns)} for way in WAYS} | {"tool_agent": {(sampled + CALLS + 1, turns)}}
    if per_episode != wanted or turns != 2 + 2 * CALLS:
        raise SystemExit(f"the ways differ in (sampled tokens, turns): {per_episode}")
    return {"episodes": len(episodes), "calls": CALLS, "sampled_tokens": sampled, "checked": True}


def rollouts(folder: Path, model: Path, episodes: int, runs: int, processes: int) -> dict[str, Any]:
    """Return the seconds of every way."""
    from verl_ext.processes import scratch_folder

    numbers = list(range(episodes))
    slowest = max(numbers, key=lambda episode: sum(wait_s(episode, turn) for turn in range(CALLS)))
    with scratch_folder() as scratch:
        import ray

        rollout = Rollout(folder, model, scratch, episodes, processes)
        try:
            work = check(rollout, numbers)
            ways: dict[str, Callable[[], object]] = {
                way: lambda way=way: rollout.run(way, numbers)  # type: ignore[misc]
                for way in ("ours", "tool_agent", "turn by turn", "generation alone")
            }
            ways["slowest alone"] = lambda: rollout.run("ours", [slowest])
            seconds = interleaved(ways, runs)
        finally:
            ray.shutdown()
    median = {way: value["median_s"] for way, value in seconds.items()}
    bound = max(median["generation alone"], median["slowest alone"])
    return {
        "work": work,
        "slowest_tools_s": round(sum(wait_s(slowest, turn) for turn in range(CALLS)), 3),
        "all_tools_s": round(sum(wait_s(number, turn) for number in numbers for turn in range(CALLS)), 1),
        "seconds": seconds,
        "times_bound": {way: round(median[way] / bound, 3) for way in ("ours", "tool_agent", "turn by turn")},
        "target_times_bound": TARGET,
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="small", help="size of the model")
    parser.add_argument(
        "--processes", type=int, default=2, help="processes of the rollout engine, with a thread each"
    )
    parser.add_argument("--model", type=Path, help="folder that keeps the reciting models for later runs")
    parser.add_argument(
        "--smoke", action="store_true", help="few episodes and one run, only to see that it works"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    # Read when verl_ext, verl and DeepSpeed are imported; DeepSpeed would print that it found no accelerator.
    os.environ |= {"VERL_USE_EXTERNAL_MODULES": "verl_ext", "VERL_PLATFORM": "cpu", "DS_ACCELERATOR": "cpu"}
    episodes, runs = (6, 1) if given.smoke else (given.episodes, given.runs)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        folder = Path(place)
        model = (given.model or folder) / given.size
        if not (model / "config.json").is_file():
            make_model(model, given.size)
        processes = given.processes
        result = {
            "benchmark": "rollout",
            "runs": runs,
            "size": given.size,
            "processes": processes,
            **rollouts(folder, model, episodes, runs, processes),
        }
    result["environment"] = environment(["ray", "torch", "transformers", "verl"])
    report(result, given.out)


if __name__ == "__main__":
    main()
