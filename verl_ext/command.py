"""The trainer's environment and command line, and the number of its steps."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from tempfile import NamedTemporaryFile
from typing import Any

from afm.errors import ConfigError
from afm.findings import Finding, Level, refuse_errors
from afm.memory_arithmetic import model_shape
from afm.plugins import TRUST_VARIABLE
from afm.rewards import load_reward
from afm.terminal import plural
from verl_ext.algorithms import ESTIMATOR
from verl_ext.compose import Flat, arguments, compose, engine_of, flatten, overrides_of
from verl_ext.doctor_episodes import engine_findings
from verl_ext.engines import engine_environment
from verl_ext.metrics import ENGINE_LOG
from verl_ext.settings import RlSettings
from verl_ext.sizes import RunSizes, check, has_critic, sizes_of
from verl_ext.teacher import check_teacher


def environment(settings: RlSettings) -> dict[str, str]:
    """Return the environment variables that the trainer needs in addition to the caller's."""
    out = settings.output_dir.absolute()
    values = {
        _MODULES: "verl_ext",
        "VERL_FILE_LOGGER_PATH": str(out / ENGINE_LOG),
        "VERL_LOGGING_LEVEL": "WARNING",
        "HYDRA_FULL_ERROR": "1",
        "PYTHONUNBUFFERED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if trusted := os.environ.get(TRUST_VARIABLE):
        values[TRUST_VARIABLE] = trusted
    if settings.platform == "cpu":
        values |= {
            "VERL_PLATFORM": "cpu",
            "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
            # Trainer and engine take turns, so waiting threads must not spin and slow down the other one.
            "OMP_WAIT_POLICY": "PASSIVE",
            # Hides real GPUs, but names one device per logical slot, which Ray requires.
            "CUDA_VISIBLE_DEVICES": ",".join(["-1"] * _slots(settings)),
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            # Keeps Ray from starting an idle worker for each of its logical CPUs.
            "RAY_enable_worker_prestart": "0",
            # Ray's default would let every other process on the machine run first.
            "RAY_worker_niceness": "0",
        }
    values |= engine_environment(engine_of(settings), on_cpu=settings.platform == "cpu")
    return values | _tracker_environment(settings, out)


def _tracker_environment(settings: RlSettings, out: Path) -> dict[str, str]:
    """Return variables with which every tracker writes into the output folder and none asks for a login."""
    values = {}
    if "tensorboard" in settings.trackers:
        values["TENSORBOARD_DIR"] = str(out / "tensorboard")
    if "wandb" in settings.trackers:
        values |= {"WANDB_DIR": str(out)} | (
            {} if os.environ.get("WANDB_API_KEY") else {"WANDB_MODE": "offline"}
        )
    if "swanlab" in settings.trackers:
        mode = "cloud" if os.environ.get("SWANLAB_API_KEY") else "offline"
        values |= {"SWANLAB_LOG_DIR": str(out / "swanlab"), "SWANLAB_MODE": mode}
    return values


def trainer_environment(settings: RlSettings) -> dict[str, str]:
    """Return the complete environment of the trainer. The caller's values win unless a variable is fixed."""
    own = environment(settings)
    inherited = dict(os.environ)
    # A cluster in the environment may belong to another user: only the settings choose one.
    inherited.pop("RAY_ADDRESS", None)
    others = [name for name in inherited.get(_MODULES, "").split(",") if name.strip() not in ("", "verl_ext")]
    return (
        own
        | inherited
        | {key: own[key] for key in _FIXED if key in own}
        | {_MODULES: ",".join(["verl_ext", *others])}
    )


_MODULES = "VERL_USE_EXTERNAL_MODULES"
_FIXED = ("VERL_FILE_LOGGER_PATH", "VERL_PLATFORM", "CUDA_VISIBLE_DEVICES")


def ensure_ray_token() -> None:
    """Write the token that closes a new Ray cluster, unless there is one.

    Ray 2.60 looks for the file before it writes it (``_private/authentication/authentication_token_setup.py``). Of two
    first starts at the same moment, one would keep a token that the other replaces, and fail.
    """
    elsewhere = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path.home() / ".ray/auth_token"
    if elsewhere or os.environ.get("RAY_AUTH_MODE", "token") != "token" or file.exists():
        return
    # FileExistsError means that another start was first. Where hard links are refused, Ray writes the token itself.
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=file.parent, prefix=".auth_token.") as new:
            new.write(token_hex(32))
            new.flush()
            os.link(new.name, file)  # whole or not at all, and never over the token of another start


def ray_overrides(settings: RlSettings, scratch: str) -> Flat:
    """Return the verl keys with which Ray starts: a new instance in ``scratch``, or the cluster at ``ray_address``."""
    init = "ray_kwargs.ray_init"
    if settings.ray_address is not None:
        variables = environment(settings)
        return {f"+{init}.address": settings.ray_address} | {
            f"+{init}.runtime_env.env_vars.{key}": value for key, value in variables.items()
        }
    values: Flat = {
        f"+{init}.address": "local",
        f"+{init}._temp_dir": scratch,
        f"+{init}.include_dashboard": False,
    }
    if (python := shlex.quote(sys.executable)) != sys.executable:
        # Ray 2.60 starts workers with `bash -c` and does not quote the interpreter's path, so a blank in it breaks them.
        values[f"+{init}.runtime_env.py_executable"] = python
    if settings.platform == "cpu":
        # These are logical slots. Actors on one small machine share its cores.
        values |= {
            f"{init}.num_cpus": 16,
            f"+{init}.num_gpus": _slots(settings),
            f"+{init}._node_ip_address": "127.0.0.1",
            f"+{init}.object_store_memory": 512 << 20,
        }
    return values


def _slots(settings: RlSettings) -> int:
    """Return the number of training processes of a CPU run."""
    trainer = settings.verl.get("trainer")
    count = trainer.get("n_gpus_per_node", 1) if isinstance(trainer, Mapping) else 1
    return count if type(count) is int and count > 0 else 1  # `check` rejects anything else


def command(settings: RlSettings, scratch: str, steps: int | None = None) -> tuple[list[str], Any]:
    """Return the trainer's command line, and the complete verl configuration that results from it.

    Args:
        steps: The result of :func:`total_steps`. If verl is asked for more steps, it ends with its epochs, treats no step as
            the last one, and saves nothing after the last planned checkpoint.

    Raises:
        ConfigError: verl does not know a key or accept a value, or the reward is wrong.
    """
    for route in settings.routes():
        load_reward(route.rewards)
    overrides = overrides_of(settings, ray_overrides(settings, scratch))
    config = compose(overrides)
    shape = model_shape(settings.model)
    check(config, shape, cluster_findings(settings, config.trainer.nnodes))
    refuse_errors(engine_findings(sizes_of(config), shape, config))
    check_teacher(settings.teacher, config, platform=settings.platform)
    if steps is not None and (config.trainer.total_training_steps or 0) > steps:
        overrides["trainer.total_training_steps"] = config.trainer.total_training_steps = steps
    # Otherwise Hydra leaves a folder `outputs/` in the working folder.
    hydra = arguments({"hydra.run.dir": str(settings.output_dir.absolute() / "hydra")})
    return [sys.executable, "-P", "-m", "verl.trainer.main_ppo", *arguments(overrides), *hydra], config


def cluster_findings(settings: RlSettings, nodes: Any) -> Iterator[Finding]:
    """Report several nodes without a cluster. On CPUs, this machine has the slots of one node only."""
    if type(nodes) is int and nodes > 1 and settings.ray_address is None:
        text = f"{nodes} nodes, but ray_address is not set: on only this machine, the run would wait for GPUs"
        on_cpu = settings.platform == "cpu"
        text = text.replace("wait for GPUs", "have one node") if on_cpu else text
        advice = "start train/ray_cluster.sh and add ray_address=HOST:PORT (docs/tutorials/nodes.md)"
        yield Finding(Level.ERROR if on_cpu else Level.WARNING, "hardware", f"{text}; {advice}")


def ignored_findings(settings: RlSettings, config: Any) -> Iterator[Finding]:
    """Report settings of a critic in a run that trains none."""
    keys = [key.lstrip("+") for key, _ in flatten(settings.verl)]
    unread = [f"verl.{key}" for key in keys if key.startswith("critic.") and key != "critic.enable"]
    if unread and not has_critic(config):
        named = unread[0] + (
            f" and {plural(len(unread) - 1, 'other key')} of the critic" if len(unread) > 1 else ""
        )
        why = f"is ignored, as {config.algorithm.adv_estimator} trains no critic"
        yield Finding(
            Level.WARNING, "algorithm", f"{named}: {why}; leave it out, or set verl.{ESTIMATOR}=gae"
        )


def _rows(file: str) -> int:
    import pyarrow
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(file).num_rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(
            f"{file}: not a parquet file ({error}); create one with `afm data prepare rl`"
        ) from None


def total_steps(settings: RlSettings) -> int:
    """Return the training steps of the whole run: the requested number, but no more than the epochs hold.

    Raises:
        ConfigError: The files hold fewer rows than a training batch.
    """
    return steps_of(compose(overrides_of(settings)), sum(_rows(file) for file in settings.train_files))


def steps_of(config: Any, rows: int) -> int:
    """Return the training steps of a composed configuration on ``rows`` rows, as :func:`total_steps` does."""
    batch = config.data.train_batch_size
    if config.data.train_max_samples > 0:
        rows = min(rows, config.data.train_max_samples)
    if rows < batch:
        raise ConfigError(
            f"train_files hold {rows} rows, fewer than a batch (data.train_batch_size: {batch})"
        )
    most = int(rows // batch * config.trainer.total_epochs)
    steps = config.trainer.total_training_steps
    return most if steps is None else min(int(steps), most)


def steps_findings(config: Any, sizes: RunSizes, rows: int, steps: int) -> Iterator[Finding]:
    """Report the number of steps, and a run that ends before the number that it was asked for."""
    text = f"{plural(steps, 'step')} of {sizes.batch} of {plural(rows, 'prompt')}"
    yield Finding(Level.OK, "steps", text)
    wanted, epochs = config.trainer.total_training_steps, config.trainer.total_epochs
    if wanted is not None and wanted > steps:
        text = f"trainer.total_training_steps={wanted:,}, but trainer.total_epochs={epochs:g} ends the run after {steps:,}"
        enough = math.ceil(wanted / (steps / epochs))
        yield Finding(Level.WARNING, "steps", f"{text}; set verl.trainer.total_epochs={enough}, or add rows")
