"""Test what RL training does when something it needs is killed or missing; each row is a real run.

    .venv/bin/python benchmarks/faults.py --out runs/faults.json            (as root: two rows make network namespaces)
    .venv/bin/python benchmarks/faults.py --only worker_update --only engine --out runs/some_faults.json

Every run trains a tiny model on the CPU. It is interrupted in its fourth step, one step after a checkpoint, and started again
with the same command. At the end, each step, sample and question must occur exactly once. A Markdown table is written next to
the JSON.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from fault_run import Run, make_inputs, whole
from fault_services import judge, recite, tool_server
from lose_a_node import lose
from timing import REPO, environment, report

from verl_ext.processes import Process
from verl_ext.shards import read_shards

SAVED, REACHED, STEPS = 2, 3, 4
"""Last checkpoint and last finished step when a run is interrupted, and number of all steps."""


@dataclass
class Row:
    """One fault and its effect."""

    name: str
    broken: str
    phase: str
    happened: str = ""
    status: int | None = None
    ended_after_s: float | None = None
    steps_again: int = 0
    checks: dict[str, bool] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Return whether all checks passed."""
        return bool(self.checks) and all(self.checks.values())


@dataclass(frozen=True)
class Kill:
    """A process to kill with ``kill -9``.

    Attributes:
        title: Part of its title; empty for the command itself.
        phase: Phase of step 4: ``rollout``, ``update`` or ``checkpoint``.
        says: Text that the message must contain.
    """

    broken: str
    title: str
    phase: str
    says: str


KILLS = {
    "command": Kill("`afm rl` itself", "", "rollout", ""),
    "first_process": Kill(
        "verl's first process", "verl.trainer.main_ppo", "rollout", "first process was killed"
    ),
    "trainer": Kill("trainer (`TaskRunner`)", "ray::TaskRunner", "update", "the trainer (process"),
    "worker_rollout": Kill("training worker", "ray::WorkerDict", "rollout", "the training worker (process"),
    "worker_update": Kill("training worker", "ray::WorkerDict", "update", "the training worker (process"),
    "worker_checkpoint": Kill(
        "training worker", "ray::WorkerDict", "checkpoint", "the training worker (process"
    ),
    "engine": Kill("rollout engine", "ray::CpuServer", "rollout", "the rollout engine (process"),
    "episodes": Kill(
        "worker that runs episodes",
        "ray::AgentLoopWorker",
        "rollout",
        "the worker that runs episodes (process",
    ),
    "samples": Kill("store of samples", "ray::SimpleStorage", "rollout", "the store of samples (process"),
}


def reach(run: Run, phase: str) -> None:
    """Wait for ``phase`` of step 4."""
    [worker] = run.titled("ray::WorkerDict")
    file = Path(f"/proc/{worker.pid}/cmdline")
    run.wait_until("step 3", lambda: REACHED in run.logged(), 0.01)
    if phase == "rollout":
        time.sleep(0.1)
        return
    doing = {"update": b"update_actor", "checkpoint": b"save_checkpoint"}[phase]
    run.wait_until(phase, lambda: doing in file.read_bytes(), 0.002)


def broken(run: Run, name: str, kill: Kill) -> Row:
    """Kill a process of a run, and wait for the end of the run."""
    row = Row(name, kill.broken, kill.phase)
    # The workers that run episodes start last.
    run.wait_until("its workers are there", lambda: run.titled("ray::AgentLoopWorker"), 0.3)
    victims = [Process(run.process.pid, 0)] if not kill.title else list(run.titled(kill.title))
    reach(run, kill.phase)
    run.family()
    for victim in victims:
        os.kill(victim.pid, signal.SIGKILL)
    row.status, row.ended_after_s = run.ended()
    sentences = [line for line in run.text().splitlines() if "checkpoint" in line and line.count(";") == 1]
    row.happened = sentences[0] if len(sentences) == 1 else ""
    row.steps_again = max(run.steps()) - SAVED
    row.checks["ended within 60 s, nothing left behind"] = row.ended_after_s < 60
    row.checks["ended as failed"] = row.status != 0
    if kill.says:
        row.checks["one sentence names what was lost and the last checkpoint"] = (
            kill.says in row.happened and f"is of step {SAVED}:" in row.happened
        )
    else:
        row.happened = "nobody is left to say anything; every process of the run ends by itself"
    return row


def went_on(run: Run) -> bool:
    """Return whether a start resumed from the last checkpoint; a dying trainer may have written that of the last step."""
    return f"resuming after step {SAVED}" in run.text() or f"model of step {STEPS}" in run.text()


def killed_processes(folder: Path, names: Sequence[str]) -> Iterator[Row]:
    """Interrupt a run repeatedly, each time in step 4; at the end it must be complete."""
    config = make_inputs(folder, STEPS)
    rows: list[Row] = []
    for name in names:
        run = Run(config)
        try:
            row = broken(run, name, KILLS[name])
        finally:
            run.stop()
        if rows:
            rows[-1].checks["went on after the last checkpoint"] = went_on(run)
        rows.append(row)
    run = Run(config)
    status, _ = run.ended()
    rows[-1].checks["went on after the last checkpoint"] = went_on(run)
    for row in rows:
        row.checks |= {"finished in the end": status == 0} | whole(run, STEPS)
    yield from rows


def other_world_size(folder: Path) -> Iterator[Row]:
    """Compare a run with 1, 2 and 1 workers with an undisturbed run with 1."""
    config, steps = make_inputs(folder, 6), 6
    # verl distributes a batch by length, and each worker splits its share into mini batches. With one mini batch per step,
    # a step has the same samples for any number of workers.
    overrides = (
        "verl.actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "verl.actor_rollout_ref.actor.ppo_epochs=1",
    )
    undisturbed = Run(config, *overrides, f"output_dir={folder / 'undisturbed'}")
    status, _ = undisturbed.ended()
    workers = "verl.trainer.n_gpus_per_node="
    for number, stop in ((1, 3), (2, 5)):
        run = Run(config, *overrides, f"{workers}{number}")
        run.wait_for_step(stop)
        run.stop()
    last = Run(config, *overrides, f"{workers}1")
    found, _ = last.ended()
    row = Row(
        "world_size", "number of training workers: 1, then 2, then 1", "between two starts", status=found
    )
    pairs = list(zip(undisturbed.metrics(), last.metrics(), strict=True))
    apart = max(abs(a[key] - b[key]) for a, b in pairs for key in ("reward", "entropy", "grad_norm"))
    by_one, by_two = (optimizer(run.folder / "checkpoints" / "global_step_4") for run in (undisturbed, last))
    moments = max(float((by_one[key] - by_two[key]).abs().max()) for key in by_one)
    row.happened = (
        f"goes on; reward, entropy and gradient of all steps within {apart:.0e} of an undisturbed run, the optimizer's moments "
        f"after two steps with 2 workers within {moments:.0e}"
    )
    log = (last.folder / "training.log").read_text()
    row.checks = whole(last, steps) | {
        "both finished": status == found == 0,
        "the same learning rates": all(a["learning_rate"] == b["learning_rate"] for a, b in pairs),
        "reward, entropy and gradient as undisturbed, to 1e-4": apart < 1e-4,
        "moments and step counts as undisturbed, to 1e-6": moments < 1e-6,
        "written by 1, read by 2": "written by 1 workers, read by 2" in log,
        "written by 2, read by 1": "written by 2 workers, read by 1" in log,
    }
    row.steps_again = 2
    yield row


def optimizer(checkpoint: Path) -> dict[str, Any]:
    """Return moments and step counts of the actor's optimizer, with each tensor merged from its parts."""
    import torch
    from torch.distributed.tensor import DTensor

    parts = [part["state"] for part in read_shards(checkpoint / "actor", "optim")]
    return {
        f"{number}.{key}": torch.cat([part[number][key]._local_tensor for part in parts])
        if isinstance(value, DTensor)
        else value
        for number, entry in parts[0].items()
        for key, value in entry.items()
    }


def lost_tool_server(folder: Path) -> Iterator[Row]:
    """Kill and restart the code server while a model keeps calling it."""
    config = recite(folder, tools=folder / "tools.yaml", steps=12)
    row = Row("tool_server", "tool server (code)", "rollout")
    with tool_server(folder) as server:
        run = Run(config, "alarms.failed_tools.steps=1")
        run.wait_for_step(2)
        server.kill()
        run.wait_for_step(4)
        server.start()
        row.status, _ = run.ended()
    failures = [step["tool_failures"] for step in run.metrics()]
    calls = [step["tool_calls"] for step in run.metrics()]
    down = [step for step, failed in enumerate(failures, start=1) if failed]
    row.happened = f"the run goes on: calls fail in the steps {down}, the model reads so, and the alarm `failed_tools` tells it"
    row.checks = whole(run, 12) | {
        "the model calls its tool": min(calls) > 0,
        "calls fail while it is down": any(failures[step - 1] for step in (3, 4)),
        "and not before or long after": failures[0] == 0 and failures[-1] == 0,
        "an alarm tells it": "alarm failed_tools" in run.text(),
        "finished": row.status == 0,
    }
    yield row


ENGINE_ERROR = "no weight 'lm_head' in this model"
BROKEN_ENGINE = f"""
import asyncio, os, pathlib
from verl_ext.patching import after_import

def break_it(module):
    original = module.CpuServer.update_weights

    async def update_weights(self, named_tensors, last, global_steps):
        if global_steps == {REACHED}:
            pathlib.Path(os.environ["BROKEN_ENGINE"]).touch()
            if os.environ["BROKEN_ENGINE"].endswith("raises"):
                raise KeyError({ENGINE_ERROR!r})
            await asyncio.sleep(60)
        await original(self, named_tensors, last, global_steps)

    module.CpuServer.update_weights = update_weights

after_import("verl_ext.rollout_cpu", break_it)
"""
"""Source that verl loads into every process of a run."""


def failing_engine(folder: Path) -> Iterator[Row]:
    """Make the rollout engine raise an error in a weight sync, and answer late in another run."""
    (folder / "broken_engine.py").write_text(BROKEN_ENGINE)
    for name, phase in (("raises", "fails"), ("sleeps", "takes a minute")):
        (folder / name).mkdir()
        config, mark = make_inputs(folder / name, STEPS), folder / name / name
        path = os.pathsep.join([str(REPO), str(folder)])
        variables = {"VERL_USE_EXTERNAL_MODULES": "verl_ext,broken_engine", "PYTHONPATH": path}
        run = Run(config, variables=variables | {"BROKEN_ENGINE": str(mark)})
        row = Row(f"engine_{name}", f"rollout engine, which {phase}", "weight sync")
        row.status, _ = run.ended()
        row.checks["it was broken"] = mark.exists()
        if name == "raises":
            row.ended_after_s = time.time() - mark.stat().st_mtime
            row.happened = next((line for line in run.text().splitlines() if "engine failed" in line), "")
            row.steps_again = max(run.steps()) - SAVED
            row.checks["ended within 60 s, as failed"] = row.ended_after_s < 60 and row.status != 0
            row.checks["one sentence with its error"] = ENGINE_ERROR in row.happened
            run = Run(config)
            row.checks["finished in the end"] = run.ended()[0] == 0
        else:
            row.happened = "the run waits for it and goes on"
            row.checks["finished"] = row.status == 0
        row.checks |= whole(run, STEPS)
        yield row


def lost_judge(folder: Path) -> Iterator[Row]:
    """Kill the judge; once it is back, the run continues."""
    reward = {
        "formula": "correct",
        "by_source": {"mini_math": "judge"},
        "judge": {"attempts": 2, "timeout_s": 5},
        "overlong": None,
    }
    config = recite(folder, rewards=reward, steps=STEPS)
    row = Row("judge", "judge", "rollout")
    with judge(folder) as server:
        run = Run(config, variables=server.variables)
        run.wait_for_step(REACHED - 1)
        server.kill()
        begun = time.monotonic()
        row.status, _ = run.ended()
        row.ended_after_s = time.monotonic() - begun
        row.happened = next((line for line in run.text().splitlines() if "abstained" in line), "")
        row.steps_again = max(run.steps()) - SAVED
        server.start()
        again = Run(config, variables=server.variables)
        status, _ = again.ended()
    row.checks = whole(again, STEPS) | {
        "ended as failed": row.status not in (0, None),
        "the message names the judge": "the judge" in row.happened,
        "finished in the end": status == 0,
    }
    yield row


def no_resources(folder: Path) -> Iterator[Row]:
    """Start a run in a cluster with too few processors for a worker."""
    config = make_inputs(folder, STEPS)
    row = Row("resources", "processors of the cluster: 2, where a worker takes 3", "start")
    with tempfile.TemporaryDirectory(prefix="afm-rl-", dir="/tmp") as scratch:
        words = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=2"]
        words += ["--num-gpus=1", "--port=6399", f"--temp-dir={scratch}", "--node-ip-address=127.0.0.1"]
        words += ["--include-dashboard=false", f"--object-store-memory={200 << 20}"]
        variables = {"VERL_PLATFORM": "cpu", "PYTHONPATH": str(REPO), "RAY_AUTH_MODE": "disabled"}
        with (folder / "ray.log").open("ab") as log:
            head = subprocess.Popen(
                words, stdout=log, stderr=log, env=os.environ | variables, start_new_session=True
            )
        try:
            time.sleep(10)
            run = Run(config, "ray_address=127.0.0.1:6399", "start_timeout_s=60", variables=variables)
            begun = time.monotonic()
            row.status, _ = run.ended()
            row.ended_after_s = time.monotonic() - begun
        finally:
            head.terminate()
            head.wait(60)
    row.happened = next((line for line in run.text().splitlines() if "Ray has not started" in line), "")
    row.checks = {
        "ended as failed": row.status not in (0, None),
        "says what is missing and what there is": bool(
            re.search(r"\(3 CPU, 1 GPU\) left; there is: \S+ [012] CPU, 1 GPU", row.happened)
        ),
    }
    yield row


def lost_node(folder: Path, count: int) -> Iterator[Row]:
    """Kill one of ``count`` Ray nodes in network namespaces, and replace it by another one."""
    seen = lose(folder, count)
    row = Row(f"node_of_{count}", f"Ray node, one of {count}", "rollout or update")
    row.happened, row.status = seen.sentence, seen.status
    row.ended_after_s, row.steps_again, row.checks = seen.ended_after_s, seen.steps_again, seen.checks
    yield row


OTHERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "tool_server": lost_tool_server,
    "judge": lost_judge,
    "failing_engine": failing_engine,
    "resources": no_resources,
    "world_size": other_world_size,
    "node_of_2": lambda folder: lost_node(folder, 2),
    "node_of_3": lambda folder: lost_node(folder, 3),
}


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| killed or missing | when | what happened | ended after | finished steps done again | samples lost or counted twice |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        after = "goes on" if row.ended_after_s is None else f"{row.ended_after_s:.0f} s"
        samples = "none" if row.good else "see the checks"
        lines.append(
            f"| {row.broken} | {row.phase} | {row.happened} | {after} | {row.steps_again} | {samples} |"
        )
    return "\n".join(lines) + "\n"


@contextmanager
def work_folder(out: Path | None) -> Iterator[Path]:
    """Yield a folder for the runs, next to the result or temporary."""
    if out is not None:
        folder = out.with_suffix("")
        folder.mkdir(parents=True)
        yield folder
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def results(folder: Path, names: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of ``names``."""
    kills = [name for name in KILLS if name in names]
    parts: list[tuple[str, Callable[[Path], Iterator[Row]]]] = []
    if kills:
        parts.append(("processes", lambda below: killed_processes(below, kills)))
    parts += [(name, run) for name, run in OTHERS.items() if name in names]
    for name, run in parts:
        (folder / name).mkdir()
        yield from run(folder / name)


def main() -> int:
    """Run the rows and print the table; return 1 if a check fails."""
    known = [*KILLS, *OTHERS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=known, metavar="NAME", help=", ".join(known))
    parser.add_argument(
        "--out", type=Path, help="JSON file; its name without the suffix is the folder of the runs"
    )
    given = parser.parse_args()
    names = given.only or known
    if os.geteuid() and {"node_of_2", "node_of_3"} & set(names):
        parser.error("node_of_2 and node_of_3 need root (network namespaces); leave them out with --only")
    begun, rows = time.monotonic(), []
    with work_folder(given.out and given.out.absolute()) as folder:
        for row in results(folder, names):
            rows.append(row)
            print(f"{row.name}: {'good' if row.good else 'BAD'}  {row.happened}", file=sys.stderr, flush=True)
            if not row.good:
                print(yaml.safe_dump(asdict(row)), file=sys.stderr, flush=True)
    result: dict[str, Any] = {
        "rows": [asdict(row) for row in rows],
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "environment": environment(["verl", "ray", "torch"]),
    }
    report(result, given.out)
    print(table(rows))
    if given.out is not None:
        given.out.with_suffix(".md").write_text(table(rows), encoding="utf-8")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
