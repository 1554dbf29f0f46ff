"""What a run will execute: environment, command line, and the checks before anything costs time."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm.errors import ConfigError, DataError, MissingExtraError
from afm.findings import (
    BUILD_ADVICE,
    FLASH_ATTENTION,
    WHY_FLASH_ATTENTION,
    has_gpu,
    lock_advice,
    try_imports,
)
from afm.rewards import load_reward
from verl_ext.checks import check
from verl_ext.compose import Flat, arguments, compose, overrides_of
from verl_ext.metrics import ENGINE_LOG
from verl_ext.rows import check_agents
from verl_ext.settings import RlSettings

if TYPE_CHECKING:
    from afm.rollout.routes import Route
    from afm.tools import Tool


def environment(settings: RlSettings) -> dict[str, str]:
    """Variables that the trainer needs beyond the caller's own."""
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
    if settings.platform == "cpu":
        values |= {
            "VERL_PLATFORM": "cpu",
            "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
            # Trainer and engine take turns: threads that spin while they wait would slow the other one.
            "OMP_WAIT_POLICY": "PASSIVE",
            # Hides real GPUs, yet names one device for each logical slot, which Ray insists on.
            "CUDA_VISIBLE_DEVICES": ",".join(["-1"] * _slots(settings)),
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            # Ray would start one idle worker for each of its logical CPUs.
            "RAY_enable_worker_prestart": "0",
            # Its workers would give way to anything else on the machine.
            "RAY_worker_niceness": "0",
        }
    return values | _tracker_environment(settings, out)


def _tracker_environment(settings: RlSettings, out: Path) -> dict[str, str]:
    """Every tracker writes into the output folder, and none asks for a login that nobody can give."""
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
    """The complete environment of the trainer: the caller's own values win where a choice is left."""
    own = environment(settings)
    inherited = dict(os.environ)
    # A cluster named in the environment belongs to somebody else unless the settings name it too.
    inherited.pop("RAY_ADDRESS", None)
    others = [name for name in inherited.get(_MODULES, "").split(",") if name.strip() not in ("", "verl_ext")]
    return (
        own
        | inherited
        | {key: own[key] for key in _FIXED if key in own}
        | {_MODULES: ",".join(["verl_ext", *others])}
    )


_ELSEWHERE = re.compile(r"\w[\w.-]*(/[\w.-]+)?|\w+://.+")
"""Models that need no folder here: names on the hub, and the addresses that verl copies from."""
_MODULES = "VERL_USE_EXTERNAL_MODULES"
_FIXED = ("VERL_FILE_LOGGER_PATH", "VERL_PLATFORM", "CUDA_VISIBLE_DEVICES")


def ray_overrides(settings: RlSettings, scratch: str) -> Flat:
    """How verl starts Ray: an instance of its own in ``scratch``, or the cluster of ``ray_address``."""
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
        # Ray 2.60 starts workers by `bash -c` with the interpreter's path unquoted: a blank in it ends every worker.
        values[f"+{init}.runtime_env.py_executable"] = python
    if settings.platform == "cpu":
        # Logical slots: actors of one small machine share its cores.
        values |= {
            f"{init}.num_cpus": 16,
            f"+{init}.num_gpus": _slots(settings),
            f"+{init}._node_ip_address": "127.0.0.1",
            f"+{init}.object_store_memory": 512 << 20,
        }
    return values


def _slots(settings: RlSettings) -> int:
    """Training processes of a CPU run."""
    trainer = settings.verl.get("trainer")
    count = trainer.get("n_gpus_per_node", 1) if isinstance(trainer, Mapping) else 1
    return count if type(count) is int and count > 0 else 1  # anything else is refused by `check`


def command(settings: RlSettings, scratch: str, steps: int | None = None) -> tuple[list[str], Any]:
    """The trainer's command line, and verl's complete configuration that it leads to.

    Args:
        steps: What :func:`total_steps` says. Asked for more, verl ends with its epochs, takes none of its steps for the last,
            and saves nothing of those since the last planned checkpoint.

    Raises:
        ConfigError: verl does not know a key, or cannot take a value; or the reward is wrong.
    """
    for route in settings.routes():
        load_reward(route.rewards)
    overrides = overrides_of(settings, ray_overrides(settings, scratch))
    config = compose(overrides)
    check(config)
    if steps is not None and (config.trainer.total_training_steps or 0) > steps:
        overrides["trainer.total_training_steps"] = config.trainer.total_training_steps = steps
    # Hydra would otherwise leave a folder `outputs/` wherever the run was started.
    hydra = arguments({"hydra.run.dir": str(settings.output_dir.absolute() / "hydra")})
    return [sys.executable, "-P", "-m", "verl.trainer.main_ppo", *arguments(overrides), *hydra], config


def check_files(settings: RlSettings) -> None:
    """Whether everything a run reads is there, before it costs time.

    Raises:
        ConfigError: A file, a tool or a weight is missing.
    """
    # Without GPUs here, the run may be meant for the nodes of a cluster, which have packages of their own.
    if missing := obstacles(settings, packages=has_gpu()):
        raise ConfigError("; ".join(missing))


def obstacles(settings: RlSettings, *, packages: bool = True) -> list[str]:
    """Files, packages and tools that a run needs and does not have.

    Args:
        packages: Look for what nodes with GPUs have, too: the packages that verl imports there, and the model's folder.
    """
    missing = [
        f"{file}: no such file (train_files, val_files)"
        for file in (*settings.train_files, *settings.val_files)
        if not Path(file).is_file()
    ]
    model = Path(settings.model)
    if settings.platform == "cpu" and not (model / "config.json").is_file():
        missing.append(f"{model}: no config.json; expected the folder of a Hugging Face model (model)")
    elif packages and not model.is_dir() and not _ELSEWHERE.fullmatch(settings.model):
        missing.append(f"{model}: no such folder; expected one, or ORGANISATION/NAME on the hub (model)")
    for look in (check_trackers, called_tools, *(() if missing else (check_agents,))):
        try:
            look(settings)
        except (ConfigError, DataError, MissingExtraError) as error:
            missing.append(str(error))
    if settings.platform == "gpu" and packages:
        missing += missing_packages(compose(overrides_of(settings, ray_overrides(settings, "RAY"))))
    return missing


def missing_packages(config: Any) -> list[str]:
    """What verl imports on a GPU machine and cannot import here: the package, who needs it, what to do."""
    needs = _gpu_modules(config)
    errors = try_imports(list(needs)).errors
    return [f"{package} {errors[name]}: {why}" for name, (package, why) in needs.items() if name in errors]


def _gpu_modules(config: Any) -> dict[str, tuple[str, str]]:
    """Modules that a configuration needs on GPUs, with their package and the reason."""
    actor, critic = config.actor_rollout_ref, config.critic.enable
    if critic is None:  # verl/trainer/ppo/utils.py:96
        critic = config.algorithm.adv_estimator == "gae"
    lock = lock_advice(f"gpu-rl-{'vllm' if actor.rollout.name == 'vllm' else 'sglang'}.txt")
    needs = {}
    if actor.rollout.name in ("sglang", "vllm"):
        needs[actor.rollout.name] = (actor.rollout.name, f"rollout.name asks for it; {lock}")
    attention = (actor.model.get("override_config") or {}).get("attn_implementation", "flash_attention_2")
    if attention == "flash_attention_2" or critic:
        needs[FLASH_ATTENTION] = ("flash_attn", f"{WHY_FLASH_ATTENTION}; {BUILD_ADVICE}")
    if (backend := actor.rollout.checkpoint_engine.backend) in ("nccl", "nixl", "delta_sharded"):
        why = f"rollout.checkpoint_engine.backend={backend} sends weights with it"
        needs["cupy"] = ("cupy", f"{why}; {lock}")
    if actor.model.get("use_liger"):
        needs["liger_kernel"] = ("liger-kernel", f"actor_rollout_ref.model.use_liger is on; {lock}")
    return needs


def check_trackers(settings: RlSettings) -> None:
    """Whether every tracker is installed.

    Raises:
        MissingExtraError: One is not.
    """
    for package in settings.trackers:
        if find_spec(package) is None:
            raise MissingExtraError(package, "trackers")


def called_tools(settings: RlSettings) -> dict[str, Tool]:
    """The tools that the agents call, by name; nothing is started.

    Raises:
        ConfigError: One is not declared, or the tools file is wrong.
    """
    called: dict[str, Tool] = {}
    for route in settings.routes():
        called |= _called_by(route)
    return called


def _called_by(route: Route) -> dict[str, Tool]:
    needed = set(route.declared.tool_roles.values())
    agent = f"agent {route.declared.name!r}" + (f" ({route.key})" if route.name else "")
    if route.tools is None:
        if needed:
            raise ConfigError(f"{agent} calls {sorted(needed)}; name a tool YAML (tools)")
        return {}
    from afm.tools import load_tools

    tools = load_tools(route.tools)
    if missing := needed - set(tools):
        raise ConfigError(f"{_named(route.tools)}: {agent} calls {sorted(missing)}, not declared there")
    return {name: tool for name, tool in tools.items() if name in needed}


def _named(tools: Path | dict[str, Any]) -> str:
    return "tools" if isinstance(tools, dict) else str(tools)


def _rows(file: str) -> int:
    import pyarrow
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(file).num_rows)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{file}: no parquet file ({error}); `afm data prepare rl` writes one") from None


def total_steps(settings: RlSettings) -> int:
    """Training steps of the whole run: as asked for, at most as many as the epochs hold.

    Raises:
        ConfigError: There are fewer rows than a training batch has.
    """
    return steps_of(compose(overrides_of(settings)), sum(_rows(file) for file in settings.train_files))


def steps_of(config: Any, rows: int) -> int:
    """Training steps of a composed configuration on so many rows; see :func:`total_steps`."""
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
