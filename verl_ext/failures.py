"""The reason why a run ended: failed episodes, an intended end, or processes that died.

Files hold the reason, because they outlive the processes that know it.
"""

from __future__ import annotations

import json
import re
import signal
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm.errors import (
    ConfigError,
    EngineError,
    MissingExtraError,
    RewardError,
    SandboxUnavailableError,
    UsageError,
)
from afm.runs.atomic import replace_text, replacing

FAILURES_FILE = "failures.jsonl"
"""One line per failed episode, with its error. A ``fatal`` one ended the run."""
VERDICT_FILE = "failure.json"
"""The reason of an intended end, which the launcher prints."""


_FATAL = (
    EngineError,
    ConfigError,
    UsageError,
    MissingExtraError,
    RewardError,
    SandboxUnavailableError,
)


def is_fatal(error: BaseException) -> bool:
    """Return whether an error would hit every episode or corrupt the model, so the first one must end the run."""
    return isinstance(error, _FATAL)


def record_failure(
    output_dir: str | Path | None,
    prompt: Any,
    error: BaseException,
    *,
    step: int = 0,
    episode: str = "",
    fatal: bool = True,
) -> None:
    """Append the failure of an episode to ``failures.jsonl``. Several processes may write at once."""
    if output_dir is None:
        return
    row = {
        "step": step,
        "episode": episode,
        "fatal": fatal,
        "prompt": str(prompt),
        "error": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    with (Path(output_dir) / FAILURES_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def first_failure(output_dir: str | Path | None) -> str | None:
    """Return ``Type: message`` of the first recorded failure that ended the run."""
    rows = _rows(Path(output_dir)) if output_dir is not None else []
    return next((f"{row['error']}: {row['message']}" for row in rows if row.get("fatal", True)), None)


def _rows(output_dir: Path) -> list[dict[str, Any]]:
    """Return the recorded failures without a half-written last line."""
    path = output_dir / FAILURES_FILE
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def write_verdict(output_dir: str | Path | None, error: BaseException) -> None:
    """Write the reason of an intended end for the launcher."""
    if output_dir is None:
        return
    row = {"error": type(error).__name__, "message": str(error)}
    (Path(output_dir) / VERDICT_FILE).write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")


def read_verdict(output_dir: str | Path) -> str | None:
    """Return the message of :func:`write_verdict`."""
    path = Path(output_dir) / VERDICT_FILE
    return json.loads(path.read_text(encoding="utf-8"))["message"] if path.exists() else None


def forget_failures(output_dir: str | Path, step: int = 0) -> None:
    """Remove the failures of an earlier start, except failed episodes up to ``step`` that did not end the run."""
    (Path(output_dir) / VERDICT_FILE).unlink(missing_ok=True)
    rows = _rows(Path(output_dir))
    kept = [row for row in rows if not row.get("fatal", True) and row.get("step", 0) <= step]
    file = Path(output_dir) / FAILURES_FILE
    if kept:
        with replacing(file) as temporary:
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
            temporary.write_text("".join(lines), encoding="utf-8")
    else:
        file.unlink(missing_ok=True)


LOSS_FILE = "loss.json"
"""File in the output folder that names the lost processes in a sentence."""
STARTED_FILE = "started.json"
"""File in the output folder that names the training process once Ray has started it."""

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
    """A dead process of the run.

    Attributes:
        role: Role of the process, in a user's words.
        node: Address of its machine.
        node_died: The machine was lost too.
        out_of_memory: Ray killed the process because its machine ran out of memory.
    """

    role: str
    pid: int
    node: str
    node_died: bool = False
    out_of_memory: bool = False


def role_of(class_name: str) -> str:
    """Return the role of an actor of this class, in a user's words."""
    return next((role for part, role in _ROLES if part in class_name), f"actor {class_name!r}")


def describe_loss(actors: list[DeadActor]) -> str:
    """Describe the lost processes in a sentence without a full stop."""
    nodes = sorted({actor.node for actor in actors if actor.node_died})
    if nodes:
        roles = Counter(actor.role for actor in actors if actor.node_died)
        parts = ", ".join(f"{count} x {role}" for role, count in roles.items())
        return f"lost the node {' and '.join(nodes)} ({parts})"
    parts = " and ".join(f"the {actor.role} (process {actor.pid} on {actor.node})" for actor in actors)
    memory = any(actor.out_of_memory for actor in actors)
    return f"lost {parts}" + (": its machine ran out of memory" if memory else ": it was killed or crashed")


def write_loss(output_dir: Path, sentence: str) -> None:
    """Write the lost processes for the launcher. Only the first call writes."""
    path = output_dir / LOSS_FILE
    if path.exists():
        return
    replace_text(path, json.dumps({"lost": sentence}))


def read_loss(output_dir: Path) -> str | None:
    """Return the sentence of :func:`write_loss`, ``None`` without one."""
    try:
        sentence: str = json.loads((output_dir / LOSS_FILE).read_text(encoding="utf-8"))["lost"]
    except (OSError, ValueError, KeyError):
        return None
    return sentence


def write_started(output_dir: Path, pid: int, node: str) -> None:
    """Write process id and node address of the trainer for the launcher."""
    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / STARTED_FILE).write_text(json.dumps({"pid": pid, "node": node}), encoding="utf-8")


def node_of_trainer(output_dir: Path) -> str:
    """Return the address of the trainer's node, empty if it is unknown."""
    try:
        node: str = json.loads((output_dir / STARTED_FILE).read_text(encoding="utf-8"))["node"]
    except (OSError, ValueError, KeyError):
        return ""
    return node


def forget_losses(output_dir: Path) -> None:
    """Remove the files of an earlier start."""
    for name in (LOSS_FILE, STARTED_FILE):
        (output_dir / name).unlink(missing_ok=True)


_DEAD = re.compile(r"\bActorDiedError: .*?\n\tclass_name: (?P<name>\S+)\n(?P<facts>(?:\t.*\n)+)(?P<why>.*)")


_UNREACHABLE = re.compile(r"\bActorUnavailableError: .*\n*\Z")


def loss_in_log(text: str, trainer_node: str = "") -> str | None:
    """Return the lost processes from the end of the trainer's log, for losses that include the reporting process.

    Args:
        text: End of the log.
        trainer_node: Address of the trainer's node.
    """
    deaths = list(_DEAD.finditer(text))
    if not deaths:
        # If a node vanishes with the trainer, no process can report the death. The log only shows a closed socket.
        if not _UNREACHABLE.search(text):
            return None
        return f"{describe_loss([DeadActor('trainer', 0, trainer_node or 'of the trainer', True)])}, or the connection to it"
    death = deaths[-1]
    facts = dict(line.strip().split(": ", 1) for line in death["facts"].splitlines() if ": " in line)
    node_died = "node has died" in death["why"] or "node was terminated" in death["why"]
    pid = int(facts.get("pid", "0")) if facts.get("pid", "0").isdigit() else 0
    return describe_loss(
        [DeadActor(role_of(death["name"]), pid, facts.get("ip", "an unknown node"), node_died)]
    )


def killed(status: int) -> str | None:
    """Describe a trainer that SIGKILL ended, ``None`` for any other exit status."""
    if status != 128 + signal.SIGKILL:
        return None
    return "the trainer's first process was killed (signal 9): by a user, or because the machine ran out of memory"
