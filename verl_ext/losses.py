"""What a run lost, in one sentence that outlives the processes which know it."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from afm.runs.atomic import replace_text

LOSS_FILE = "loss.json"
"""In the output folder: what was lost, in a sentence."""
STARTED_FILE = "started.json"
"""In the output folder: which process trains, once Ray has started it."""

_ROLES = (
    ("WorkerDict", "training worker"),
    ("Server", "rollout engine"),
    ("AgentLoopWorker", "worker that runs episodes"),
    ("RewardLoopWorker", "reward worker"),
    ("TransferQueue", "store of samples"),
    ("SimpleStorage", "store of samples"),
    ("TaskRunner", "trainer"),
)


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


def write_loss(output_dir: Path, sentence: str) -> None:
    """Leave what was lost for the launcher; the first one counts."""
    path = output_dir / LOSS_FILE
    if path.exists():
        return
    replace_text(path, json.dumps({"lost": sentence}))


def read_loss(output_dir: Path) -> str | None:
    """The sentence left by :func:`write_loss`."""
    try:
        sentence: str = json.loads((output_dir / LOSS_FILE).read_text(encoding="utf-8"))["lost"]
    except (OSError, ValueError, KeyError):
        return None
    return sentence


def write_started(output_dir: Path, pid: int, node: str) -> None:
    """Leave for the launcher which process trains, on the node of which address."""
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / STARTED_FILE).write_text(json.dumps({"pid": pid, "node": node}), encoding="utf-8")


def node_of_trainer(output_dir: Path) -> str:
    """Address of the node that trains, empty when it is not known."""
    try:
        node: str = json.loads((output_dir / STARTED_FILE).read_text(encoding="utf-8"))["node"]
    except (OSError, ValueError, KeyError):
        return ""
    return node


def forget_losses(output_dir: Path) -> None:
    """Remove what an earlier start left."""
    for name in (LOSS_FILE, STARTED_FILE):
        (output_dir / name).unlink(missing_ok=True)


_DEAD = re.compile(r"\bActorDiedError: .*?\n\tclass_name: (?P<name>\S+)\n(?P<facts>(?:\t.*\n)+)(?P<why>.*)")


_UNREACHABLE = re.compile(r"\bActorUnavailableError: .*\n*\Z")


def loss_in_log(text: str, trainer_node: str = "") -> str | None:
    """What was lost, from the end of the trainer's log: for the process that would have told it otherwise.

    Args:
        text: The log's end.
        trainer_node: Address of the node that the trainer ran on.
    """
    deaths = list(_DEAD.finditer(text))
    if not deaths:
        # A node that vanishes with the trainer leaves nobody to say who died: the socket is closed, no more.
        if not _UNREACHABLE.search(text):
            return None
        return f"{told([DeadActor('trainer', 0, trainer_node or 'of the trainer', True)])}, or the connection to it"
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
