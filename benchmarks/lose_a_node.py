"""Test a run on two or three Ray nodes that loses a node and continues with another one.

    .venv/bin/python benchmarks/lose_a_node.py --nodes 3 --out runs/lose_a_node        (as root: it makes network namespaces)

Namespaces on a bridge simulate machines. ``train/ray_cluster.sh`` starts the cluster. The last node is killed with ``kill -9``
in the middle of a step. A spare node replaces it, and the same command continues from the last checkpoint. Before that, a node
without the token tries to join.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fault_run import SECONDS, Run, make_inputs, whole
from timing import REPO, report

NODES = ("a", "b", "c", "d")
PORT = 6379
STEPS, SAVE_EVERY = 6, 2


def command(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a short command and capture its output."""
    return subprocess.run(words, text=True, capture_output=True, **options)


@dataclass
class Nodes:
    """Namespaces ``afm_a`` to ``afm_d`` with the addresses 10.77.0.1 to 10.77.0.4, and what runs in them."""

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
        """Kill the processes in the namespaces and remove the namespaces."""
        for name in NODES:
            self.kill(name)
            command(
                "ip", "link", "del", f"afm_v{name}"
            )  # otherwise it disappears some time after the namespace
            command("ip", "netns", "del", f"afm_{name}")
        command("ip", "link", "del", "afm_br")

    def start(self, name: str, words: Sequence[str], log: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a program on a node, with its output in ``log``."""
        with (self.folder / log).open("ab") as file:
            return subprocess.Popen(
                [*self.entering(name), *words],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self.environment() | variables,
                cwd=REPO,
                start_new_session=True,
            )

    @staticmethod
    def entering(name: str) -> tuple[str, ...]:
        """Return the words before a command that runs on a node."""
        return ("ip", "netns", "exec", f"afm_{name}")

    def refuses(self, name: str) -> bool:
        """Return whether the cluster refuses node ``name`` without the token."""
        code = "import ray; ray.init(address='10.77.0.1:6379', logging_level='ERROR')"
        stranger = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN_PATH": ""}
        return self.start(name, [sys.executable, "-c", code], "stranger.log", **stranger).wait(SECONDS) != 0

    def environment(self) -> dict[str, str]:
        """Return the environment of every process of the cluster."""
        return os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "VERL_PLATFORM": "cpu",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }

    def join(self, name: str) -> None:
        """Start the head on ``a`` or a node elsewhere, and wait until it is in the cluster."""
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
        """Return the status of the cluster."""
        return command(
            *self.entering("a"),
            str(REPO / "train/ray_cluster.sh"),
            "status",
            env=self.environment() | {"HEAD": f"10.77.0.1:{PORT}"},
        ).stdout

    def nodes(self) -> str:
        """Return the names of the cluster's live nodes."""
        code = "import ray; ray.init(address='10.77.0.1:6379', logging_level='ERROR'); print(ray.cluster_resources())"
        return command(*self.entering("a"), sys.executable, "-c", code, env=self.environment()).stdout

    def kill(self, name: str) -> int:
        """Kill everything on a node with ``kill -9``; return the number of processes."""
        numbers = [int(word) for word in command("ip", "netns", "pids", f"afm_{name}").stdout.split()]
        for number in numbers:
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return len(numbers)


@contextmanager
def cluster(folder: Path, names: Sequence[str]) -> Iterator[Nodes]:
    """Run a cluster of nodes."""
    nodes = Nodes(folder)
    nodes.make()
    try:
        for name in names:
            nodes.join(name)
        yield nodes
    finally:
        nodes.remove()


@dataclass(frozen=True)
class Seen:
    """The effects of a lost node."""

    sentence: str
    status: int
    ended_after_s: float
    steps_again: int
    checks: dict[str, bool]


def lose(folder: Path, count: int) -> Seen:
    """Train on ``count`` nodes, kill the last one in the middle of a step, and continue with a replacement."""
    per_node = {
        2: (),
        3: ("verl.data.train_batch_size=6", "verl.actor_rollout_ref.actor.ppo_mini_batch_size=3"),
    }
    overrides = (*per_node[count], f"verl.trainer.nnodes={count}", f"ray_address=10.77.0.1:{PORT}")
    config = make_inputs(folder, STEPS)
    *first, spare = NODES[: count + 1]
    checks = {}
    with cluster(folder, first) as nodes:
        checks["a party without the token is refused"] = nodes.refuses(spare)
        entering: dict[str, Any] = {"prefix": nodes.entering("a"), "variables": nodes.environment()}
        run = Run(config, *overrides, **entering)
        run.wait_for_step(SAVE_EVERY + 1)
        begun = time.monotonic()
        checks["processes ran on the lost node"] = nodes.kill(first[-1]) > 0
        status, _ = run.ended()
        ended_after_s = time.monotonic() - begun
        reached = max(run.steps())
        resumed = reached - reached % SAVE_EVERY
        nodes.join(spare)
        again = Run(config, *overrides, **entering)
        second, _ = again.ended()
    address = f"10.77.0.{len(first)}"
    sentence = next((line for line in run.text().splitlines() if f"lost the node {address}" in line), "")
    checks |= {
        "ended as failed": status not in (0, None),
        "one sentence names the node and the last checkpoint": f"is of step {resumed}:" in sentence,
        "went on after the last checkpoint": f"resuming after step {resumed}" in again.text(),
        "finished with another node in its place": second == 0,
    }
    return Seen(sentence, status, round(ended_after_s, 1), reached - resumed, checks | whole(again, STEPS))


def main() -> None:
    """Run everything and print the observations."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, choices=(2, 3), default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/lose_a_node"))
    given = parser.parse_args()
    folder = given.out.absolute()
    if os.geteuid():
        raise SystemExit("network namespaces need root")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty")
    seen = lose(folder, given.nodes)
    report({"seen": asdict(seen)}, folder / "result.json")
    sys.exit(0 if all(seen.checks.values()) else 1)


if __name__ == "__main__":
    main()
