"""What a run lost or waits for: dead workers and nodes, resources that Ray does not grant, in one sentence.

Ray tells a caller that an actor died only if that caller waits for it. verl waits for finished episodes instead, for ever, when
the process that runs them is gone; and for the resources of its workers, for ever, when no node has them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm.errors import AfmError

LOSS_FILE = "loss.json"
"""In the output folder: what was lost, in a sentence."""
STARTED_FILE = "started.json"
"""In the output folder: which process trains, once Ray has started it."""
START_TIMEOUT_S = 600.0
LOSS_GRACE_S = 30.0
_POLL_S = 2.0
_END_S = 30.0
_SETTLE_S = 6.0
"""How long a failure waits for Ray to notice whose death has caused it."""

_ROLES = (
    ("WorkerDict", "training worker"),
    ("Server", "rollout engine"),
    ("AgentLoopWorker", "worker that runs episodes"),
    ("RewardLoopWorker", "reward worker"),
    ("TransferQueue", "store of samples"),
    ("SimpleStorage", "store of samples"),
    ("TaskRunner", "trainer"),
)
_DIED = {"WORKER_DIED", "NODE_DIED"}


@dataclass(frozen=True, slots=True)
class DeadActor:
    """A process of the run that is gone.

    Attributes:
        role: What it did, in a user's words.
        node: Address of its machine.
        node_died: The machine is gone with it.
        out_of_memory: Ray ended it because its machine ran out of memory.
    """

    role: str
    pid: int
    node: str
    node_died: bool = False
    out_of_memory: bool = False


def role_of(class_name: str) -> str:
    """What an actor of this class does, in a user's words."""
    return next((role for part, role in _ROLES if part in class_name), f"actor {class_name!r}")


def dead_actors() -> list[DeadActor]:
    """Actors of this job that died without being asked to (in a process connected to Ray)."""
    import ray
    import ray._private.state
    from ray.core.generated import common_pb2

    reasons = common_pb2.ActorDiedErrorContext.Reason
    job = ray.get_runtime_context().get_job_id()
    gone = {node["NodeID"] for node in ray.nodes() if not node["Alive"]}
    found = []
    for actor in ray._private.state.actors(actor_state_name="DEAD").values():
        cause = actor["DeathCause"]
        memory = cause.HasField("oom_context")
        died = cause.actor_died_error_context
        if actor["JobID"] != job or not (memory or reasons.Name(died.reason) in _DIED):
            continue
        node_died = reasons.Name(died.reason) == "NODE_DIED" or actor["Address"]["NodeID"] in gone
        address = actor["Address"]["IPAddress"] or died.node_ip_address
        found.append(DeadActor(role_of(actor["ActorClassName"]), actor["Pid"], address, node_died, memory))
    return found


def told(actors: list[DeadActor]) -> str:
    """A sentence about what was lost, without its full stop."""
    nodes = sorted({actor.node for actor in actors if actor.node_died})
    if nodes:
        roles = Counter(actor.role for actor in actors if actor.node_died)
        parts = ", ".join(f"{count} x {role}" for role, count in roles.items())
        return f"lost the node {' and '.join(nodes)} ({parts})"
    parts = " and ".join(f"the {actor.role} (process {actor.pid} on {actor.node})" for actor in actors)
    memory = any(actor.out_of_memory for actor in actors)
    return f"lost {parts}" + (": its machine ran out of memory" if memory else ": it was killed or crashed")


def workers_started() -> bool:
    """Whether Ray has found room for a training worker of this job."""
    import ray
    import ray._private.state

    job = ray.get_runtime_context().get_job_id()
    alive = ray._private.state.actors(actor_state_name="ALIVE").values()
    return any(actor["JobID"] == job and "WorkerDict" in actor["ActorClassName"] for actor in alive)


def not_started(after_s: float) -> str:
    """A sentence about workers that Ray did not start, and what it lacks for them."""
    import ray
    import ray._private.state
    from ray.util import placement_group_table

    sentence = f"Ray has not started the training workers in {after_s:g} s (start_timeout_s)"
    groups = [group for group in placement_group_table().values() if "verl_group" in str(group["name"])]
    waiting = [group for group in groups if group["state"] == "PENDING"]
    if not waiting:
        return sentence
    bundles = list(waiting[0]["bundles"].values())
    names = sorted(bundles[0])
    free = ray._private.state.available_resources_per_node()
    nodes = "; ".join(
        f"{node['NodeManagerAddress']} {_amounts(free.get(node['NodeID'], {}), names)}"
        for node in ray.nodes()
        if node["Alive"]
    )
    return (
        f"{sentence}: {len(waiting)} of {len(groups)} nodes are missing that have {len(bundles)} x "
        f"({_amounts(bundles[0], names)}) left; there is: {nodes}"
    )


def _amounts(of: Mapping[str, float], names: list[str]) -> str:
    return ", ".join(f"{of.get(name, 0):g} {name}" for name in names)


def write_loss(output_dir: Path, sentence: str) -> None:
    """Leave what was lost for the launcher; the first one counts."""
    path = output_dir / LOSS_FILE
    if path.exists():
        return
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({"lost": sentence}), encoding="utf-8")
    temporary.replace(path)


def read_loss(output_dir: Path) -> str | None:
    """The sentence left by :func:`write_loss`."""
    try:
        sentence: str = json.loads((output_dir / LOSS_FILE).read_text(encoding="utf-8"))["lost"]
    except (OSError, ValueError, KeyError):
        return None
    return sentence


def forget_losses(output_dir: Path) -> None:
    """Remove what an earlier start left."""
    for name in (LOSS_FILE, STARTED_FILE):
        (output_dir / name).unlink(missing_ok=True)


_DEAD = re.compile(r"\bActorDiedError: .*?\n\tclass_name: (?P<name>\S+)\n(?P<facts>(?:\t.*\n)+)(?P<why>.*)")


def loss_in_log(text: str) -> str | None:
    """What was lost, from the end of the trainer's log: for the process that would have told it otherwise."""
    deaths = list(_DEAD.finditer(text))
    if not deaths:
        return None
    found = deaths[-1]
    facts = dict(line.strip().split(": ", 1) for line in found["facts"].splitlines() if ": " in line)
    node_died = "node has died" in found["why"] or "node was terminated" in found["why"]
    pid = int(facts.get("pid", "0")) if facts.get("pid", "0").isdigit() else 0
    return told([DeadActor(role_of(found["name"]), pid, facts.get("ip", "an unknown node"), node_died)])


def killed(status: int) -> str | None:
    """What to say of a trainer that a signal ended, ``None`` for any other exit status."""
    if status != 128 + signal.SIGKILL:
        return None
    return "the trainer's first process was killed (signal 9): by somebody, or because the machine ran out of memory"


class Watch(threading.Thread):
    """Looks after a run's processes from the one that trains; ends it when nothing else would.

    Args:
        output_dir: Of the run.
        loss_grace_s: How long after a loss the trainer may take to end by itself.
        start_timeout_s: How long Ray may take to start the training workers.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        loss_grace_s: float = LOSS_GRACE_S,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        super().__init__(name="afm-losses", daemon=True)
        self._output_dir = output_dir
        self._loss_grace_s = loss_grace_s
        self._start_timeout_s = start_timeout_s

    def run(self) -> None:
        """Look every few seconds until the process ends."""
        begun, lost_at, working = time.monotonic(), 0.0, False
        while True:
            time.sleep(_POLL_S)
            now = time.monotonic()
            if not lost_at and self.look():
                lost_at = now
            if lost_at and now - lost_at > self._loss_grace_s:
                os._exit(1)
            if not working and now - begun > self._start_timeout_s:
                working = workers_started()
                if not working:
                    write_loss(self._output_dir, not_started(self._start_timeout_s))
                    os._exit(1)

    def look(self, patience_s: float = 0.0) -> bool:
        """Whether something was lost; if so, it is written down.

        Args:
            patience_s: How long to wait for Ray to notice.
        """
        until = time.monotonic() + patience_s
        while True:
            actors = dead_actors()
            if actors:
                # A node's processes are noticed one by one.
                time.sleep(_POLL_S / 2)
                write_loss(self._output_dir, told(dead_actors()))
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(0.5)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Let a failure within be explained by the loss that caused it."""
        try:
            yield
        except Exception as error:
            ours = isinstance(error, AfmError) and "server failed" not in str(error)
            self.look(0.0 if ours else _SETTLE_S)
            raise


def watch(config: Any) -> Watch:
    """The watch over the run of verl's ``config``; settings are in ``trainer.afm``."""
    output_dir = Path(config.trainer.default_local_dir).parent
    settings = dict(config.trainer.get("afm") or {})
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / STARTED_FILE).write_text(json.dumps({"pid": os.getpid()}), encoding="utf-8")
    found = Watch(output_dir, **settings)
    found.start()
    return found


class Patience:
    """How long a launcher waits for a trainer that shows no sign of life.

    Args:
        output_dir: Of the run.
        start_timeout_s: How long Ray may take to start the trainer's own process.
        loss_grace_s: How long a trainer that lost something may take to end.
    """

    def __init__(self, output_dir: Path, *, start_timeout_s: float, loss_grace_s: float) -> None:
        self._output_dir = output_dir
        self._start_timeout_s = start_timeout_s
        self._loss_grace_s = loss_grace_s
        self._begun = time.time()

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to wait for."""
        if not (self._output_dir / STARTED_FILE).exists():
            if time.time() - self._begun <= self._start_timeout_s:
                return False
            write_loss(
                self._output_dir,
                f"Ray has not started the trainer in {self._start_timeout_s:g} s (start_timeout_s): it takes one free CPU "
                "of the cluster",
            )
            return True
        loss = self._output_dir / LOSS_FILE
        # The trainer ends itself within the grace; then Ray tells the process that started it.
        return loss.exists() and time.time() - loss.stat().st_mtime > self._loss_grace_s + _END_S
