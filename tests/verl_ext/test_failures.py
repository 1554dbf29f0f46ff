"""The failure that ended a run, and its lost processes: from Ray, or from the end of the trainer's log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from afm.errors import ConfigError, DataError, EngineError, RefusedError, SandboxUnavailableError
from verl_ext.failures import (
    FAILURES_FILE,
    LOSS_FILE,
    STARTED_FILE,
    DeadActor,
    describe_loss,
    first_failure,
    forget_failures,
    forget_losses,
    is_fatal,
    loss_in_log,
    node_of_trainer,
    read_loss,
    record_failure,
    role_of,
    write_loss,
    write_started,
)
from verl_ext.ray_watch import TrainerPatience


def test_what_every_episode_would_meet_ends_a_run() -> None:
    for error in (EngineError, RefusedError, ConfigError, SandboxUnavailableError):
        assert is_fatal(error("for everyone"))
    assert not any(map(is_fatal, (DataError("no question"), KeyError("x"))))


def test_the_failure_that_ended_a_run_is_told_from_those_that_it_went_on_without(tmp_path: Path) -> None:
    assert first_failure(tmp_path) is None
    record_failure(tmp_path, "p", KeyError("x"), step=2, episode="2/u/0", fatal=False)
    assert first_failure(tmp_path) is None
    record_failure(tmp_path, "p", EngineError("server died"), step=3)
    assert first_failure(tmp_path) == "EngineError: server died"


def test_a_resumed_run_keeps_the_list_up_to_its_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        record_failure(tmp_path, "p", KeyError("x"), step=step, fatal=False)
    record_failure(tmp_path, "p", EngineError("server died"), step=2)
    with (tmp_path / FAILURES_FILE).open("a") as file:
        file.write('{"step": 1, "half a li')
    forget_failures(tmp_path, 2)
    lines = (tmp_path / FAILURES_FILE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    forget_failures(tmp_path)
    assert not (tmp_path / FAILURES_FILE).exists()


ROOT = Path(__file__).resolve().parents[2]

KILLED_ACTORS = """
import json, os, pathlib, signal, sys, threading, time
import ray
import ray._private.state
from verl_ext.ray_watch import RayWatch, dead_actors, not_started, report_engine_error, workers_started

ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=sys.argv[1])

@ray.remote(num_cpus=0)
class CpuServer:
    def pid(self):
        return os.getpid()

class WorkerDict(CpuServer.__ray_actor_class__):
    pass

server, asked, left, worker = CpuServer.remote(), CpuServer.remote(), CpuServer.remote(), ray.remote(num_cpus=0)(WorkerDict).remote()
pids = ray.get([actor.pid.remote() for actor in (server, asked, left, worker)])
working = workers_started()
ray.kill(asked)
del left
while len(ray._private.state.actors(actor_state_name="DEAD")) < 2:
    time.sleep(0.1)
unharmed = not dead_actors()
# On a busy machine, Ray says long before it gives the process up that it cannot be reached.
report_engine_error(ray.exceptions.ActorUnavailableError("connection reset", None), "in generate")
threading.Timer(8, os.kill, (pids[0], signal.SIGKILL)).start()
found = RayWatch(pathlib.Path(sys.argv[2])).look(patience_s=300)
group = ray.util.placement_group([{"CPU": 3, "GPU": 1}], name="global_poolverl_group_1:0")
while not any(each["state"] == "PENDING" for each in ray.util.placement_group_table().values()):
    time.sleep(0.1)
seen = {"working": working, "unharmed": unharmed, "found": found, "killed": pids[0], "missing": not_started(5)}
pathlib.Path(sys.argv[2], "seen.json").write_text(json.dumps(seen))
"""


@pytest.mark.slow
def test_ray_is_asked_who_died_and_who_has_no_place(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    import tempfile

    variables = os.environ | {"PYTHONPATH": str(ROOT), "RAY_enable_worker_prestart": "0"}
    variables.pop(
        "CUDA_VISIBLE_DEVICES", None
    )  # where it names none, Ray gives no actor the slot asked for below
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="afm-rl-") as scratch:
        words = [sys.executable, "-c", KILLED_ACTORS, scratch, str(tmp_path)]
        result = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["working"]
    assert seen["unharmed"]
    assert seen["found"]
    assert str(read_loss(tmp_path)).startswith(f"lost the rollout engine (process {seen['killed']} on ")
    head, _, rest = seen["missing"].partition(": ")
    assert head == "Ray has not started the training workers in 5 s (start_timeout_s)"
    assert rest.startswith("1 of 1 required nodes do not have 1 x (3 CPU, 1 GPU) free; available: ")
    assert rest.endswith(" 2 CPU, 1 GPU")


WORKER = DeadActor("training worker", 7, "10.0.0.2")
FULL = DeadActor("rollout engine", 8, "10.0.0.2", out_of_memory=True)
NODE = [
    DeadActor(role, number, "10.0.0.3", node_died=True)
    for number, role in enumerate(("training worker", "training worker", "rollout engine"))
]


@pytest.mark.parametrize(
    ("dead", "sentence"),
    [
        ([WORKER], "lost the training worker (process 7 on 10.0.0.2): it was killed or crashed"),
        ([FULL], "lost the rollout engine (process 8 on 10.0.0.2): its machine ran out of memory"),
        # What dies elsewhere because of that is no news.
        ([*NODE, WORKER], "lost the node 10.0.0.3 (2 x training worker, 1 x rollout engine)"),
    ],
)
def test_a_process_a_node_and_memory_are_told_apart(dead: list[DeadActor], sentence: str) -> None:
    assert describe_loss(dead) == sentence


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("abcWorkerDict", "training worker"),
        ("AgentLoopWorkerTQ", "worker that runs episodes"),
        ("Other", "actor 'Other'"),
    ],
)
def test_actors_are_named_by_what_they_do(name: str, role: str) -> None:
    assert role_of(name) == role


DIED = """Traceback (most recent call last):
    raise value
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tclass_name: TaskRunnerV1
\tactor_id: ba6538467d12dad185901ede01000000
\tpid: 29536
\tnamespace: 709a6ab9-9186-429e-bc9f-2f6bf56b80b2
\tip: 192.0.2.2
"""


def test_a_trainer_that_died_is_found_in_the_log() -> None:
    why = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR\n"
    lost = "lost the trainer (process 29536 on 192.0.2.2): it was killed or crashed"
    assert loss_in_log(DIED + why) == lost
    node = "The actor died because its node has died. Node Id: 0123\n"
    assert loss_in_log(DIED + why + DIED + node) == "lost the node 192.0.2.2 (1 x trainer)"
    assert loss_in_log("RuntimeError: something else\n") is None


def test_a_trainer_that_vanished_with_its_node_is_found_in_the_log(tmp_path: Path) -> None:
    closed = "ray.exceptions.ActorUnavailableError: The actor b7 is unavailable: RPC error: Socket closed rpc_code: 14. "
    write_started(tmp_path, 7, "10.77.0.2")
    lost = loss_in_log(f"Traceback\n{closed}\n", node_of_trainer(tmp_path))
    assert lost == "lost the node 10.77.0.2 (1 x trainer), or the connection to it"
    assert loss_in_log(closed, node_of_trainer(tmp_path / "absent")) is not None
    assert loss_in_log(f"{closed}\nValueError: what ended it in truth\n") is None


def test_the_first_loss_is_kept_until_the_next_start(tmp_path: Path) -> None:
    assert read_loss(tmp_path) is None
    write_loss(tmp_path, "lost a")
    write_loss(tmp_path, "lost b")
    (tmp_path / STARTED_FILE).touch()
    assert read_loss(tmp_path) == "lost a"
    forget_losses(tmp_path)
    assert read_loss(tmp_path) is None
    assert not (tmp_path / STARTED_FILE).exists()


def test_a_trainer_that_never_starts_is_given_up(tmp_path: Path) -> None:
    assert not TrainerPatience(tmp_path, start_timeout_s=600, loss_grace_s=5).ended
    patience = TrainerPatience(tmp_path, start_timeout_s=0.2, loss_grace_s=5)
    time.sleep(0.25)
    assert patience.ended
    assert "Ray has not started the trainer in 0.2 s (start_timeout_s)" in str(read_loss(tmp_path))


def test_a_started_trainer_may_take_its_time_unless_it_lost_something_long_ago(tmp_path: Path) -> None:
    patience = TrainerPatience(tmp_path, start_timeout_s=0, loss_grace_s=5)
    (tmp_path / STARTED_FILE).touch()
    assert not patience.ended
    (tmp_path / LOSS_FILE).write_text(json.dumps({"lost": "lost a"}))
    assert not patience.ended
    long_ago = time.time() - 60
    os.utime(tmp_path / LOSS_FILE, (long_ago, long_ago))
    assert patience.ended


WEIGHT_SYNC = """
import asyncio, os, pathlib, sys, time
import ray
from verl_ext.ray_watch import RayWatch

scratch, out, behaviour = sys.argv[1:]
ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=scratch)

@ray.remote(num_cpus=0, name="vllm_server_0_0")
class Server:  # what verl's adapter asks of vLLMHttpServer
    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if behaviour == "raises":
            raise AttributeError("'Parameter' object has no attribute 'weight_loader'")
        await asyncio.sleep(10)
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
        import torch
        job = ray.get_runtime_context().get_job_id()
        handle = f"ipc:///tmp/rl-colocate-zmq-{job}-replica-0-rank-0.sock"
        receiver = BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
        await asyncio.to_thread(receiver.receive_weights, lambda weights, is_last: None)

    async def clear_kv_cache(self): pass
    async def set_global_steps(self, step): pass

@ray.remote(num_cpus=0)
class Worker:
    async def sync(self):
        os.environ |= {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1"}
        import torch
        from verl.workers.config import RolloutConfig
        from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter
        adapter = ServerAdapter(RolloutConfig(name="vllm", tensor_model_parallel_size=1), None, None, 0)
        adapter.use_shm = True
        await adapter.update_weights(iter([("w", torch.ones(4))]), global_steps=1)

server, worker = Server.remote(), Worker.remote()
watch = RayWatch(pathlib.Path(out), loss_grace_s=3)
watch.start()
ray.get(worker.sync.remote())
watch.stop()
"""


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", ["raises", pytest.param("is slow", marks=pytest.mark.proof)])
def test_an_engine_that_fails_in_a_weight_sync_ends_the_run_and_a_slow_one_does_not(
    tmp_path: Path, behaviour: str
) -> None:
    """Uses verl's own adapter and sender. vLLM is only a name, because verl checks for it."""
    import tempfile

    (tmp_path / "vllm" / "distributed").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("LLM = None")
    (tmp_path / "vllm" / "distributed" / "__init__.py").write_text("parallel_state = None")
    (tmp_path / "vllm-0.24.0.dist-info").mkdir()
    (tmp_path / "vllm-0.24.0.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.24.0\n")
    variables = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_ext"}
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    with tempfile.TemporaryDirectory(prefix="afm-rl-", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        words = [sys.executable, "-c", WEIGHT_SYNC, scratch, str(tmp_path), behaviour]
        done = subprocess.run(
            words, env=os.environ | variables | path, capture_output=True, text=True, timeout=600
        )
    lost = "the rollout engine failed in update_weights_from_ipc: AttributeError: "
    lost += "'Parameter' object has no attribute 'weight_loader'"
    raises = behaviour == "raises"
    assert done.returncode == raises, done.stderr[-3000:]
    assert read_loss(tmp_path) == (lost if raises else None)
