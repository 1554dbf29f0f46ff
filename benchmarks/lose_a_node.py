"""A training on two Ray nodes that loses one of them, and goes on with another: what happened, and what was lost.

    .venv/bin/python benchmarks/lose_a_node.py --out runs/lose_a_node        (as root: it makes network namespaces)

Three namespaces on one bridge stand for three machines. The cluster is started by ``train/ray_cluster.sh``. The second node is
killed with ``kill -9`` in the middle of a step; the third takes its place, and the same command goes on from the last checkpoint.
A fourth party without the token tries to join.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import yaml
from timing import REPO, report

from afm.models.tiny import create_tiny_model, train_tokenizer

NODES = ("a", "b", "c")
PORT = 6379
STEPS, SAVE_EVERY = 8, 2
SECONDS = 600


def command(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a short command; its output is kept."""
    return subprocess.run(words, text=True, capture_output=True, **options)


@dataclass
class Nodes:
    """Namespaces ``afm_a`` to ``afm_c`` with the addresses 10.77.0.1 to 10.77.0.3, and what runs in them."""

    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def make(self) -> None:
        """Create the bridge and the namespaces."""
        self.remove()
        command("ip", "link", "add", "afm_br", "type", "bridge", check=True)
        command("ip", "link", "set", "afm_br", "up", check=True)
        for number, name in enumerate(NODES, start=1):
            space, ends = f"afm_{name}", (f"afm_v{name}", "eth0")
            command("ip", "netns", "add", space, check=True)
            command(
                "ip",
                "link",
                "add",
                ends[0],
                "type",
                "veth",
                "peer",
                "name",
                ends[1],
                "netns",
                space,
                check=True,
            )
            command("ip", "link", "set", ends[0], "master", "afm_br", "up", check=True)
            command("ip", "-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0", check=True)
            for device in ("eth0", "lo"):
                command("ip", "-n", space, "link", "set", device, "up", check=True)

    def remove(self) -> None:
        """End what runs in the namespaces and remove them."""
        for name in NODES:
            self.kill(name)
            command("ip", "netns", "del", f"afm_{name}")
        command("ip", "link", "del", "afm_br")

    def start(self, name: str, words: Sequence[str], log: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a program on a node; its output goes to ``log``."""
        with (self.folder / log).open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", f"afm_{name}", *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self.environment() | variables,
                cwd=REPO,
                start_new_session=True,
            )

    def environment(self) -> dict[str, str]:
        """What every process of the cluster is started with."""
        return os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "VERL_PLATFORM": "cpu",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def join(self, name: str) -> None:
        """Start the head on ``a``, a node elsewhere, and wait until the cluster knows it."""
        kind, address = ("head" if name == "a" else "node"), f"10.77.0.{NODES.index(name) + 1}"
        words = [str(REPO / "train/ray_cluster.sh"), kind, "--num-cpus", "16", "--num-gpus", "1"]
        words += ["--object-store-memory", str(300 << 20), "--temp-dir", f"/tmp/afm_ray_{name}"]
        self.start(name, words, f"node_{name}.log", NODE_IP=address, HEAD=f"10.77.0.1:{PORT}")
        begun = time.monotonic()
        while "Active:" not in self.status() or f"node:{address}" not in self.nodes():
            if time.monotonic() - begun > SECONDS:
                raise SystemExit(f"node {name} did not start; see {self.folder / f'node_{name}.log'}")
            time.sleep(1)

    def status(self) -> str:
        """What the head says of the cluster."""
        return command(
            *("ip", "netns", "exec", "afm_a", str(REPO / "train/ray_cluster.sh"), "status"),
            env=self.environment() | {"HEAD": f"10.77.0.1:{PORT}"},
        ).stdout

    def nodes(self) -> str:
        """Names of the cluster's living nodes."""
        code = "import ray; ray.init(address='10.77.0.1:6379', logging_level='ERROR'); print(ray.cluster_resources())"
        return command(
            "ip", "netns", "exec", "afm_a", sys.executable, "-c", code, env=self.environment()
        ).stdout

    def kill(self, name: str) -> int:
        """``kill -9`` everything on a node; how many processes."""
        numbers = [int(word) for word in command("ip", "netns", "pids", f"afm_{name}").stdout.split()]
        for number in numbers:
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return len(numbers)


@contextmanager
def cluster(folder: Path) -> Iterator[Nodes]:
    """Two nodes that have found each other."""
    nodes = Nodes(folder)
    nodes.make()
    try:
        nodes.join("a")
        nodes.join("b")
        yield nodes
    finally:
        nodes.remove()


def make_inputs(folder: Path) -> Path:
    """A random model, 64 questions and the settings of a run on two nodes."""
    texts = ["Tom has 12 coins. How many?", "<plan>p</plan><think>t</think><answer>12</answer>"] * 40
    train_tokenizer(texts, folder / "tokenizer", vocab_size=300)
    create_tiny_model(folder / "tokenizer", folder / "model", seed=0, hidden_size=32, layers=1)
    rows = [
        {
            "data_source": "mini_math",
            "prompt": [{"role": "user", "content": f"{number}+1?"}],
            "reward_model": {"ground_truth": str(number + 1)},
            "extra_info": {"index": f"q{number}", "question": f"{number}+1?"},
        }
        for number in range(64)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rl.parquet")
    settings = {
        "extends": str(REPO / "configs/tiny/rl/math.yaml"),
        "model": str(folder / "model"),
        "train_files": str(folder / "rl.parquet"),
        "output_dir": str(folder / "run"),
        "ray_address": f"10.77.0.1:{PORT}",
        "limits": {"max_response_tokens": 96},
        # A random model solves nothing: it is paid for ending early, so that rewards differ.
        "rewards": {"formula": "overlong", "overlong": {"max_tokens": 96, "buffer_tokens": 96}},
        "verl": {
            "data": {"train_batch_size": 4, "max_prompt_length": 160},
            "algorithm": {"filter_groups": {"enable": False}},
            "actor_rollout_ref": {
                "actor": {"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 4},
                "rollout": {"n": 4, "log_prob_micro_batch_size_per_gpu": 8},
            },
            "trainer": {"nnodes": 2, "total_training_steps": STEPS, "save_freq": SAVE_EVERY},
        },
    }
    (folder / "rl.yaml").write_text(yaml.safe_dump(settings))
    return folder / "rl.yaml"


def steps_of(folder: Path) -> list[int]:
    """Steps in the run's metrics, in order."""
    file = folder / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def wait_for_step(trainer: subprocess.Popen[bytes], folder: Path, step: int) -> None:
    """Return when the run has reported ``step``."""
    begun = time.monotonic()
    while step not in steps_of(folder):
        if trainer.poll() is not None or time.monotonic() - begun > SECONDS:
            raise SystemExit(f"the run ended or hangs before step {step}; see {folder / 'run.log'}")
        time.sleep(0.2)


def main() -> None:
    """Run everything and print what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/lose_a_node"))
    folder = parser.parse_args().out.absolute()
    if os.geteuid():
        raise SystemExit("network namespaces need root")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty")
    config = make_inputs(folder)
    words = [sys.executable, "-m", "afm.cli.main", "rl", str(config)]
    seen: dict[str, Any] = {}
    with cluster(folder) as nodes:
        code = "import ray; ray.init(address='10.77.0.1:6379', logging_level='ERROR')"
        stranger = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN_PATH": ""}
        refused = nodes.start("c", [sys.executable, "-c", code], "stranger.log", **stranger).wait(SECONDS)
        seen["a party without the token is refused"] = refused != 0
        trainer = nodes.start("a", words, "run.log")
        wait_for_step(trainer, folder, 5)
        begun = time.monotonic()
        seen["processes killed on the second node"] = nodes.kill("b")
        seen["exit status of the run"] = trainer.wait(SECONDS)
        seen["seconds until it ended"] = round(time.monotonic() - begun, 1)
        reached = max(steps_of(folder))
        nodes.join("c")
        trainer = nodes.start("a", words, "run.log")
        seen["exit status with another node in its place"] = trainer.wait(SECONDS)
    steps = steps_of(folder)
    resumed = reached - reached % SAVE_EVERY
    seen["steps reported before the loss"] = reached
    seen["steps done again (since the last checkpoint)"] = reached - resumed
    seen["each step once in the metrics"] = steps == list(range(1, STEPS + 1))
    seen["model of the last step"] = json.loads((folder / "run/model/training.json").read_text())[
        "global_step"
    ]
    report({"seen": seen}, folder / "result.json")


if __name__ == "__main__":
    main()
