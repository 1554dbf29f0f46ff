"""What would go wrong with a reinforcement-learning run, told before anything costs time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from afm.errors import ConfigError
from afm.findings import Finding, Level, Report, has_gpu
from afm.memory_arithmetic import (
    GIB,
    Hardware,
    ModelShape,
    described,
    fits,
    missing_model_files,
    model_shape,
    recipe_hardware,
)
from afm.rewards import RewardSettings
from afm.rollout.routes import Route
from afm.settings import load_settings as load_environment
from afm.tools.health import tool_findings, unanswered
from verl_ext.checks import check
from verl_ext.compose import compose, overrides_of
from verl_ext.doctor_findings import (
    agent_findings,
    engine_findings,
    judge_address,
    judge_findings,
    reward_settings,
)
from verl_ext.memory_estimate import checkpoint_finding, host_bytes, kv_cache, phases
from verl_ext.plan import called_tools, check_trackers, missing_packages, ray_overrides, steps_of
from verl_ext.prompts import rl_prompts
from verl_ext.rows import Rows, prompt_finding, read_rows, row_findings
from verl_ext.settings import RlSettings, load_settings
from verl_ext.workload import Workload, split_findings, workload_of

_TRACKER_KEYS = {"wandb": "WANDB_API_KEY", "swanlab": "SWANLAB_API_KEY"}
_DEFAULT_GIB = 80.0

Rewards = Mapping[str, RewardSettings]
"""Of each agent, by its key in ``agents:``; the only one has the empty key."""


@dataclass(frozen=True, slots=True)
class AskedHardware:
    """What options say; the configuration decides what they leave open."""

    nodes: int | None = None
    gpus: int | None = None
    gpu_gib: float | None = None

    def overrides(self) -> list[str]:
        """The options as keys of verl, which are what a run goes by."""
        counts = {"trainer.nnodes": self.nodes, "trainer.n_gpus_per_node": self.gpus}
        return [f"verl.{key}={count}" for key, count in counts.items() if count is not None]


def diagnose(
    config_path: str | Path, overrides: Sequence[str], asked: AskedHardware, env: Mapping[str, str]
) -> list[Finding]:
    """Everything that can be said about a run without starting it; no error is raised."""
    report = Report()
    settings = report.asked("keys", lambda: load_settings(config_path, [*overrides, *asked.overrides()]))
    if settings is None or report.asked("agent", settings.routes) is None:
        return report.findings
    config = report.asked("keys", lambda: compose(overrides_of(settings, ray_overrides(settings, "RAY"))))
    routes = settings.routes()
    rewards = report.asked("rewards", lambda: {r.name: reward_settings(r.rewards) for r in routes})
    rows = _rows(settings, rewards, report) if rewards is not None else None
    _surroundings(settings, report, env)
    if config is None:
        return report.findings
    report.add(Finding(Level.OK, "keys", "verl knows all of them"))
    _engine(settings, config, report)
    report.add(*_packages(settings, config))
    written = recipe_hardware(Path(config_path))
    size = asked.gpu_gib or (written.gpu_gib if written else _DEFAULT_GIB)
    load = report.asked("batch", lambda: workload_of(config, size))
    if load is not None:
        report.add(*_hardware(settings, load, None if asked.overrides() else written))
        _sizes(settings, config, load, rewards, rows, report)
    return report.findings


def _sizes(
    settings: RlSettings,
    config: Any,
    load: Workload,
    rewards: Rewards | None,
    rows: Rows | None,
    report: Report,
) -> None:
    """Everything that is arithmetic."""
    routes = settings.routes()
    shape = report.asked("model", lambda: model_shape(settings.model))
    report.asked("batch", lambda: check(config))
    report.add(*split_findings(load, shape))
    steps = _steps(config, rows, load, report)
    if rewards is not None:
        report.add(*engine_findings(load, shape, config))
        for route in routes:
            findings = agent_findings(load, route.limits, rewards[route.name], config)
            report.add(*(_of_agent(finding, route) for finding in findings))
    if rewards is not None and rows is not None:
        for route in routes:
            _judge(route, rows, load, rewards[route.name], steps, report)
        report.asked("prompts", lambda: _prompts(settings, rows, load, report))
    if shape is None:
        text = "the model's config.json is not here; no estimate"
        advice = "for one, say model=Qwen/Qwen2.5-7B-Instruct or another that is known by name"
        report.add(Finding(Level.WARNING, "memory", f"{text}; {advice}"))
        return
    report.add(checkpoint_finding(load, shape, settings.output_dir, steps))
    if settings.platform == "gpu":
        report.add(*_memory(load, shape))


def _rows(settings: RlSettings, rewards: Rewards, report: Report) -> Rows | None:
    """Read the training rows and the others; only the training rows are returned."""
    routes = settings.routes()
    by_source = {agent: reward.by_source for agent, reward in rewards.items()}
    trained = report.asked("data", lambda: read_rows(settings.train_files, routes, by_source))
    if trained is not None:
        report.add(*row_findings(trained, routes, "train_files"))
    tested = report.asked("data", lambda: read_rows(settings.val_files, routes, by_source))
    if tested is not None and settings.val_files:
        report.add(*row_findings(tested, routes, "val_files"))
    if trained is not None and not trained.bad_count:
        prompts = report.asked("prompts", lambda: rl_prompts(settings))
        report.add(*([Finding(Level.OK, "prompts", str(prompts))] if prompts else []))
    return trained


def _of_agent(finding: Finding, route: Route) -> Finding:
    """A finding about one of several agents, with its name."""
    return replace(finding, text=f"{route.name}: {finding.text}") if route.name else finding


def _surroundings(settings: RlSettings, report: Report, env: Mapping[str, str]) -> None:
    """The model's folder, the output folder, trackers and tools."""
    report.add(*_model(settings), *_output(settings))
    report.asked("trackers", lambda: check_trackers(settings))
    for name in settings.trackers:
        if (key := _TRACKER_KEYS.get(name)) and not env.get(key):
            report.add(Finding(Level.OK, "trackers", f"{name}: offline, as {key} is not set"))
    tools = report.asked("tools", lambda: called_tools(settings))
    if tools:
        report.add(*tool_findings(tools))


def _model(settings: RlSettings) -> Iterator[Finding]:
    folder = Path(settings.model).expanduser()
    if not folder.is_dir():
        level = Level.ERROR if settings.platform == "cpu" else Level.WARNING
        text = f"{settings.model}: no folder here; verl would look for it on the Hugging Face hub"
        yield Finding(level, "model", text)
        return
    if missing := missing_model_files(folder):
        yield Finding(Level.ERROR, "model", f"{folder}: without {', '.join(missing)}; expected a whole model")
    else:
        yield Finding(Level.OK, "model", f"{folder}: configuration, weights and tokenizer")


def _output(settings: RlSettings) -> Iterator[Finding]:
    folder = settings.output_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield Finding(
            Level.ERROR, "output", f"output_dir {settings.output_dir}: {folder} cannot be written to"
        )


def _engine(settings: RlSettings, config: Any, report: Report) -> None:
    """Have verl check its configuration itself; a critic's needs the model's files."""
    local = (Path(settings.model).expanduser() / "tokenizer.json").is_file()
    if report.asked("engine", lambda: _validated(config, with_critic=local)) is not None:
        report.add(Finding(Level.OK, "engine", "verl's own validation accepts the configuration"))


def _validated(config: Any, *, with_critic: bool) -> bool:
    from contextlib import redirect_stdout
    from io import StringIO

    try:
        with redirect_stdout(StringIO()):
            from verl.trainer.ppo.utils import need_critic, need_reference_policy
            from verl.utils.config import validate_config

            critic = with_critic and need_critic(config)
            validate_config(config, need_reference_policy(config), critic)
    except Exception as error:  # noqa: BLE001 - whatever verl finds wrong, in whatever form
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        raise ConfigError(f"verl refuses the configuration: {type(error).__name__}: {reason}") from None
    return True


def _packages(settings: RlSettings, config: Any) -> Iterator[Finding]:
    """What verl imports on a GPU machine only; an error where this is one, since the run would end."""
    if settings.platform != "gpu":
        return
    level = Level.ERROR if has_gpu() else Level.WARNING
    here = "" if has_gpu() else "for the machine that trains: "
    missing = missing_packages(config)
    for text in missing:
        yield Finding(level, "packages", f"{here}{text}")
    if not missing:
        yield Finding(Level.OK, "packages", "those that the configuration needs on GPUs can be imported")


def _hardware(settings: RlSettings, load: Workload, written: Hardware | None) -> Iterator[Finding]:
    yield Finding(Level.OK, "hardware", f"{load.hardware}")
    if written and (written.nodes, written.gpus) != (load.hardware.nodes, load.hardware.gpus):
        keys = "verl.trainer.nnodes and n_gpus_per_node, by which verl goes"
        yield Finding(Level.WARNING, "hardware", f"the recipe's header says {written}; other than {keys}")
    if settings.platform == "gpu" and load.hardware.nodes > 1 and settings.ray_address is None:
        text = f"{load.hardware.nodes} nodes, but ray_address is not set: a run on this machine alone would wait for GPUs"
        yield Finding(
            Level.WARNING, "hardware", f"{text}; start train/ray_cluster.sh, add ray_address=HOST:PORT"
        )


def _steps(config: Any, rows: Rows | None, load: Workload, report: Report) -> int | None:
    if rows is None:
        return load.steps
    steps = report.asked("steps", lambda: steps_of(config, rows.count))
    if steps is not None:
        report.add(Finding(Level.OK, "steps", f"{steps:,} steps of {load.batch} of {rows.count:,} prompts"))
    return steps


def _judge(
    route: Route, all_rows: Rows, load: Workload, reward: RewardSettings, steps: int | None, report: Report
) -> None:
    environment = report.asked("judge", load_environment)
    if environment is None:
        return
    rows = all_rows.by_agent[route.name]
    share = rows.good / max(1, all_rows.good)
    findings = report.asked(
        "judge", lambda: list(judge_findings(rows, load, reward, environment, steps, share))
    )
    report.add(*(_of_agent(finding, route) for finding in findings or ()))
    address = judge_address(reward, environment) if rows.scorers["judge"] else None
    if findings and address and (why := asyncio.run(unanswered(address))):
        report.add(Finding(Level.WARNING, "judge", f"nobody answers at {address} ({why})"))


def _prompts(settings: RlSettings, rows: Rows, load: Workload, report: Report) -> None:
    model = Path(settings.model).expanduser()
    if finding := prompt_finding(rows, model, load.prompt):
        report.add(finding)


def _memory(load: Workload, shape: ModelShape) -> Iterator[Finding]:
    size = load.hardware.gpu_gib
    for name, need in phases(load, shape).items():
        enough = fits(need.total, size)
        over = "" if enough else f", more than {size:g}; {_advice(load, name)}"
        level = Level.OK if enough else Level.WARNING
        yield Finding(level, "memory", f"{name}: {described(need)}{over}")
    yield Finding(
        Level.OK, "memory", f"each node's CPU holds {host_bytes(load, shape) / GIB:,.0f} GiB meanwhile"
    )
    cache = kv_cache(load, shape)
    wanted = -(-load.episodes // max(1, load.engines))
    text = (
        f"{max(0, cache.tokens):,} tokens in each of {load.engines} engines ({cache.token_bytes / 1024:.0f} KiB a token "
        f"on each GPU): {cache.sequences} episodes of full length at once, of {wanted} that a step gives it"
    )
    if cache.sequences < 1:
        advice = "raise rollout.gpu_memory_utilization or tensor_model_parallel_size, or shorten the response"
        yield Finding(Level.ERROR, "kv cache", f"{text}; {advice}")
    else:
        yield Finding(Level.OK, "kv cache", text)


def _advice(load: Workload, phase: str) -> str:
    match phase:
        case "rollout" | "weights to engine":
            return "lower rollout.gpu_memory_utilization, or offload (fsdp_config.param_offload, optimizer_offload)"
        case "critic update":
            return "raise critic.ulysses_sequence_parallel_size, use more GPUs, or critic.fsdp.offload_policy=true"
        case _:
            longer = "lower ppo_max_token_len_per_gpu and raise ulysses_sequence_parallel_size"
            fused = "" if load.fused_logits else "model.use_fused_kernels=true, "
            return f"{fused}{longer}, use more GPUs, or fsdp_config.offload_policy=true"
