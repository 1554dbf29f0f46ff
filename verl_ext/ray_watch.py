"""Watches the processes of a run on Ray: which ones died, which engine failed, and which ones never started.

Ray reports the death or failure of an actor only to a caller that waits for it. In three cases verl waits
forever for something else:

- for finished episodes, after the process that runs them has died;
- for an engine to fetch its weights, after the engine has raised an error;
- for the resources of its workers, if no node has them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from afm.errors import AfmError, EngineError
from verl_ext.failures import (
    LOSS_FILE,
    STARTED_FILE,
    DeadActor,
    describe_loss,
    role_of,
    write_loss,
    write_started,
    write_verdict,
)

_POLL_S = 2.0
_END_S = 30.0
_SETTLE_S = 6.0
"""Seconds for Ray to notice the death that caused a failure."""
_UNREACHABLE_S = 60.0
"""The same for a process that does not answer: Ray gives up a node after some missed heartbeats, later on a busy machine."""
_ERROR_CHARACTERS = 500
_DIED = {"WORKER_DIED", "NODE_DIED"}
_LOG = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


def dead_actors() -> list[DeadActor]:
    """Return the actors of this job that died unexpectedly. The process must be connected to Ray."""
    import ray
    import ray._private.state
    from ray.core.generated import common_pb2

    reasons = common_pb2.ActorDiedErrorContext.Reason
    job = ray.get_runtime_context().get_job_id()
    gone = {node["NodeID"] for node in ray.nodes() if not node["Alive"]}
    dead = []
    for actor in ray._private.state.actors(actor_state_name="DEAD").values():
        cause = actor["DeathCause"]
        memory = cause.HasField("oom_context")
        died = cause.actor_died_error_context
        if actor["JobID"] != job or not (memory or reasons.Name(died.reason) in _DIED):
            continue
        node_died = reasons.Name(died.reason) == "NODE_DIED" or actor["Address"]["NodeID"] in gone
        address = actor["Address"]["IPAddress"] or died.node_ip_address
        dead.append(DeadActor(role_of(actor["ActorClassName"]), actor["Pid"], address, node_died, memory))
    return dead


def report_engine_error(error: BaseException, doing: str) -> None:
    """Report to the watch that a rollout engine failed, from any process of the run. Only the first report counts.

    Args:
        error: The error of the engine.
        doing: The failed request, such as ``in generate``.
    """
    import ray
    from ray.experimental.internal_kv import _internal_kv_put

    if not ray.is_initialized():
        return
    cause = getattr(error, "cause", None) or error
    text = (str(cause).strip().splitlines() or ["no message"])[0][:_ERROR_CHARACTERS]
    sentence = f"the rollout engine failed {doing}: {type(cause).__name__}: {text}"
    try:
        _internal_kv_put(_engine_key(), sentence.encode(), overwrite=False)
    except Exception as failure:  # noqa: BLE001 - the caller gets the engine's error too
        _LOG.warning("not reported (%s: %s): %s", type(failure).__name__, failure, sentence)


def report_if_it_fails(reply: Any, doing: str) -> None:
    """Report an engine whose ``reply`` (an ``ObjectRef``) is an error, even if no caller waits for the reply.

    Args:
        doing: See :func:`report_engine_error`.
    """

    def look(future: Any) -> None:
        if error := future.exception():
            # Ray's own thread calls this function, and it must not wait for Ray.
            threading.Thread(target=report_engine_error, args=(error, doing), daemon=True).start()

    reply.future().add_done_callback(look)


def engine_error() -> str | None:
    """Return the sentence of the first :func:`report_engine_error` of this job, ``None`` without one."""
    from ray.experimental.internal_kv import _internal_kv_get

    message = _internal_kv_get(_engine_key())
    return None if message is None else bytes(message).decode()


def _engine_key() -> bytes:
    import ray

    return f"afm-engine-error-{ray.get_runtime_context().get_job_id()}".encode()


def workers_started() -> bool:
    """Return whether Ray has started a training worker of this job."""
    import ray
    import ray._private.state

    job = ray.get_runtime_context().get_job_id()
    alive = ray._private.state.actors(actor_state_name="ALIVE").values()
    return any(actor["JobID"] == job and "WorkerDict" in actor["ActorClassName"] for actor in alive)


def not_started(after_s: float) -> str:
    """Describe workers that Ray did not start, and the resources that it lacks for them."""
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
        f"{sentence}: {len(waiting)} of {len(groups)} required nodes do not have {len(bundles)} x "
        f"({_amounts(bundles[0], names)}) free; available: {nodes}"
    )


def _amounts(of: Mapping[str, float], names: list[str]) -> str:
    return ", ".join(f"{of.get(name, 0):g} {name}" for name in names)


class RayWatch(threading.Thread):
    """Watches a run's processes from the trainer, and ends the trainer if it would wait forever.

    Args:
        output_dir: Output folder of the run.
        loss_grace_s: Seconds in which a trainer may end by itself after a loss.
        start_timeout_s: Seconds in which Ray must start the training workers.
    """

    def __init__(
        self, output_dir: Path, *, loss_grace_s: float = 30.0, start_timeout_s: float = 600.0
    ) -> None:
        super().__init__(name="afm-losses", daemon=True)
        self._output_dir = output_dir
        self._loss_grace_s = loss_grace_s
        self._start_timeout_s = start_timeout_s
        self._over = threading.Event()

    def run(self) -> None:
        """Look every few seconds until :meth:`stop`, and end the process after a loss or a missed start."""
        begun, lost_at, working = time.monotonic(), 0.0, False
        while not self._over.wait(_POLL_S):
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
        """Return whether a process or an engine was lost, and write the loss to a file.

        Args:
            patience_s: Seconds to wait for Ray to notice.
        """
        until = time.monotonic() + patience_s
        while not (first := _asked(dead_actors)) and not (failed := _asked(engine_error)):
            if time.monotonic() >= until:
                return False
            time.sleep(0.5)
        if not first:
            # A failed engine may have ended its process. One that cannot be reached may be on a lost node.
            patience_s = _UNREACHABLE_S if "ActorUnavailableError" in str(failed) else _SETTLE_S
            until = time.monotonic() + patience_s
            while not first and time.monotonic() < until:
                time.sleep(0.5)
                first = _asked(dead_actors)
        time.sleep(_POLL_S / 2)  # Ray notices the processes of a node one by one
        first = _asked(dead_actors) or first
        write_loss(self._output_dir, describe_loss(first) if first else str(failed))
        return True

    def stop(self) -> None:
        """Stop the watch: the run is over, and its processes end as planned."""
        self._over.set()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Look for the loss that caused a failure inside the block, and write it to a file."""
        try:
            yield
        except Exception as error:
            if isinstance(error, EngineError) and "weight_proof" in str(error):
                write_verdict(self._output_dir, getattr(error, "cause", None) or error)
            ours = isinstance(error, AfmError) and "server failed" not in str(error)
            if "desired GPUs" in str(error):
                write_loss(
                    self._output_dir,
                    f"the cluster lacks nodes (trainer.nnodes, trainer.n_gpus_per_node): {error}",
                )
            else:
                self.look(0.0 if ours else _SETTLE_S)
            raise


def _asked(question: Callable[[], _Answer]) -> _Answer | None:
    """Return Ray's answer, or ``None`` if it does not answer. That ends neither the run nor the watch."""
    try:
        return question()
    except Exception as error:  # noqa: BLE001 - see above
        _LOG.warning("Ray did not report what was lost: %s: %s", type(error).__name__, error)
        return None


def watch(config: Any) -> RayWatch:
    """Start and return the watch of the run of verl's ``config``, with the settings in ``trainer.afm``."""
    output_dir = Path(config.trainer.default_local_dir).parent
    settings = dict(config.trainer.get("afm") or {})
    import ray

    write_started(output_dir, os.getpid(), ray.util.get_node_ip_address())
    run_watch = RayWatch(output_dir, **settings)
    run_watch.start()
    return run_watch


class TrainerPatience:
    """The time that a launcher waits for a trainer that has not started or does not end.

    Args:
        output_dir: Output folder of the run.
        start_timeout_s: Seconds in which Ray must start the trainer's process.
        loss_grace_s: Seconds in which a trainer must end after a loss.
    """

    def __init__(self, output_dir: Path, *, start_timeout_s: float, loss_grace_s: float) -> None:
        self._output_dir = output_dir
        self._start_timeout_s = start_timeout_s
        self._loss_grace_s = loss_grace_s
        self._begun = time.time()

    @property
    def ended(self) -> bool:
        """Whether the launcher should stop waiting."""
        if not (self._output_dir / STARTED_FILE).exists():
            if time.time() - self._begun <= self._start_timeout_s:
                return False
            write_loss(
                self._output_dir,
                f"Ray has not started the trainer in {self._start_timeout_s:g} s (start_timeout_s): it needs one free CPU "
                "of the cluster",
            )
            return True
        loss = self._output_dir / LOSS_FILE
        # The trainer ends itself within the grace period, and then Ray informs the process that started it.
        return loss.exists() and time.time() - loss.stat().st_mtime > self._loss_grace_s + _END_S
