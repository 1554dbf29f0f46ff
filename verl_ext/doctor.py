"""Checks of a reinforcement-learning run before it starts.

:func:`diagnose` is ``afm doctor``. :func:`start_findings` is the part of it that runs at every start.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm.errors import ConfigError, MissingExtraError
from afm.findings import (
    BUILD_ADVICE,
    FLASH_ATTENTION,
    WHY_FLASH_ATTENTION,
    Finding,
    Level,
    Report,
    absent,
    failed,
    fetch_advice,
    has_gpu,
    lock_advice,
    made_by,
    try_imports,
)
from afm.harness.settings import program_finding
from afm.memory_arithmetic import Hardware, missing_model_files, model_shape, recipe_hardware
from afm.rewards import RewardSettings
from afm.rollout.routes import Route, Routes
from afm.settings import load_settings as load_environment
from afm.terminal import plural
from afm.tools.health import loopback_findings, tool_findings, unanswered
from verl_ext.algorithms import CPU_ENGINE, choice_findings
from verl_ext.command import cluster_findings, ignored_findings, ray_overrides, steps_findings, steps_of
from verl_ext.compose import compose, overrides_of
from verl_ext.doctor_episodes import (
    Rewards,
    agent_findings,
    engine_findings,
    judge_address,
    judge_addresses,
    judge_findings,
    prompt_finding,
    reward_settings,
    sandbox_findings,
)
from verl_ext.engines import installed_findings, parameter_findings
from verl_ext.memory_arithmetic import checkpoint_finding, cpu_memory_finding, memory_findings
from verl_ext.rows import Rows, check_file, check_kinds, read_rows, rl_prompts, row_findings
from verl_ext.settings import RlSettings, load_settings
from verl_ext.sizes import RunSizes, has_critic, size_findings, sizes_of
from verl_ext.teacher import tokenizer_finding

if TYPE_CHECKING:
    from afm.tools import Tool

_TRACKER_KEYS = {"wandb": "WANDB_API_KEY", "swanlab": "SWANLAB_API_KEY"}
_ELSEWHERE = re.compile(r"(?!(?:models|runs)/)\w[\w.-]*(/[\w.-]+)?|\w+://.+")
"""Models that need no local folder: names on the hub, and addresses from which verl copies."""


@dataclass(frozen=True, slots=True)
class AskedHardware:
    """Hardware that command-line options name. The configuration decides what they omit."""

    nodes: int | None = None
    gpus: int | None = None
    gpu_gib: float | None = None

    def overrides(self) -> list[str]:
        """Return the options as overrides of verl's keys, which decide what a run uses."""
        counts = {"trainer.nnodes": self.nodes, "trainer.n_gpus_per_node": self.gpus}
        return [f"verl.{key}={count}" for key, count in counts.items() if count is not None]


def diagnose(
    config_path: str | Path,
    overrides: Sequence[str],
    asked: AskedHardware,
    env: Mapping[str, str],
    report: Report | None = None,
) -> list[Finding]:
    """Return all findings about a run without starting it. Raises no error."""
    report = report or Report()
    settings = report.asked("keys", lambda: load_settings(config_path, [*overrides, *asked.overrides()]))
    if settings is None or report.asked("agent", settings.routes) is None:
        return report.findings
    config = report.asked("keys", lambda: _composed(settings))
    routes = settings.routes()
    rewards = report.asked("rewards", lambda: _rewards(routes))
    rows = _rows(settings, rewards, report) if rewards is not None else None
    tools = _requirements(settings, config, report, here=has_gpu())
    report.add(*_output(settings), *_offline(settings, env), *(tool_findings(tools) if tools else ()))
    if config is None:
        return report.findings
    nodes = config.trainer.nnodes
    report.add(*loopback_findings(tools, nodes), *sandbox_findings(settings, tools, rows, rewards, nodes))
    report.add(Finding(Level.OK, "keys", "verl accepts every key"), *choice_findings(config))
    report.add(*parameter_findings(config), *ignored_findings(settings, config))
    _engine(settings, config, report)
    written = recipe_hardware(Path(config_path))
    size = asked.gpu_gib or (written or Hardware()).gpu_gib
    sizes = report.asked("batch", lambda: sizes_of(config, size))
    if sizes is not None:
        report.add(*_hardware(settings, sizes, None if asked.overrides() else written))
        _arithmetic(settings, config, sizes, rewards, rows, report)
    return report.findings


def start_findings(settings: RlSettings, *, here: bool) -> list[Finding]:
    """Return findings about the files, packages and tools that a run needs.

    Args:
        here: The run trains on this machine. Otherwise packages and models may exist only on the nodes of a cluster.
    """
    report = Report()
    for file in (*settings.train_files, *settings.val_files):
        if not Path(file).is_file():
            text, advice = absent(file, settings.recipe_file)
            report.add(Finding(Level.ERROR, "data", f"{file}: {text} (train_files, val_files){advice}"))
        else:
            report.asked("data", partial(check_file, file))
    config = _composed(settings) if settings.platform == "cpu" or here else None
    tools = _requirements(settings, config, report, here=here)
    scorers = None
    if not failed(report.findings):
        rewards = report.asked("rewards", lambda: _rewards(settings.routes()))
        by_source = {agent: reward.by_source for agent, reward in (rewards or {}).items()}
        scorers = report.asked("rewards", lambda: check_kinds(settings, by_source)) if rewards else None
    if config is not None:
        report.add(*cluster_findings(settings, config.trainer.nnodes), *ignored_findings(settings, config))
        judges = report.asked("rewards", lambda: judge_addresses(settings.routes(), scorers))
        report.add(*loopback_findings(tools, config.trainer.nnodes, judges or ()))
    return report.findings


def _rewards(routes: Routes) -> Rewards:
    return {route.name: reward_settings(route.rewards) for route in routes}


def _composed(settings: RlSettings) -> Any:
    return compose(overrides_of(settings, ray_overrides(settings, "RAY")))


def _requirements(settings: RlSettings, config: Any, report: Report, *, here: bool) -> Mapping[str, Tool]:
    """Check the model, the trackers, the packages and the tools of the agents, and return the tools."""
    report.add(_model(settings, here=here))
    if settings.teacher is not None and Path(settings.model).is_dir():
        teacher = settings.teacher
        if finding := report.asked("teacher", lambda: tokenizer_finding(teacher, settings.model)):
            report.add(finding)
    if settings.harness is not None:
        report.add(program_finding(settings.harness))
    for package in settings.trackers:
        if find_spec(package) is None:
            report.add(Finding(Level.ERROR, "trackers", str(MissingExtraError(package, "trackers"))))
    if config is not None:
        report.add(*installed_findings(config))
    if config is not None and settings.platform == "gpu":
        report.checking("packages")
        report.add(*_packages(config, here=here))
    return report.asked("tools", lambda: called_tools(settings)) or {}


def _model(settings: RlSettings, *, here: bool) -> Finding:
    folder = Path(settings.model)
    if folder.is_dir():
        if missing := missing_model_files(folder):
            text = f"{folder}: lacks {', '.join(missing)}; expected a complete model"
            return Finding(Level.ERROR, "model", text)
        return Finding(Level.OK, "model", f"{folder}: configuration, weights and tokenizer")
    if settings.platform == "gpu" and _ELSEWHERE.fullmatch(settings.model):
        text = f"{settings.model}: no such folder here; verl would look for it on the Hugging Face hub"
        text += fetch_advice(settings.model, "model") if "/" not in settings.model else ""
        return Finding(Level.WARNING, "model", text)
    if settings.platform == "gpu" and not here:
        text = f"{settings.model}: no such folder here; it must be on the training machine (model)"
        return Finding(Level.WARNING, "model", text + fetch_advice(settings.model, "model") + made_by(folder))
    expected = "expected a model's folder" + (
        ", or ORGANISATION/NAME on the hub" if settings.platform == "gpu" else ""
    )
    text, advice = absent(folder, settings.recipe_file, "folder")
    advice += fetch_advice(settings.model, "model" if settings.platform == "gpu" else "")
    return Finding(Level.ERROR, "model", f"{settings.model}: {text}; {expected} (model){advice}")


def _packages(config: Any, *, here: bool) -> Iterator[Finding]:
    """Report packages that verl imports only on a GPU machine: what needs them, and what to do."""
    needs = _gpu_modules(config)
    errors = try_imports(list(needs)).errors
    for name, (package, why) in needs.items():
        if name in errors:
            text = ("" if here else "on the training machine: ") + f"{package} {errors[name]}: {why}"
            yield Finding(Level.ERROR if here else Level.WARNING, "packages", text)
    if not errors:
        yield Finding(
            Level.OK, "packages", "every package that the configuration needs on GPUs can be imported"
        )


def _gpu_modules(config: Any) -> dict[str, tuple[str, str]]:
    """Return the modules that a configuration needs on GPUs: module to package and reason."""
    actor = config.actor_rollout_ref
    lock = lock_advice(f"gpu-rl-{'sglang' if actor.rollout.name == 'sglang' else 'vllm'}")
    needs = {}
    if actor.rollout.name in ("sglang", "vllm"):
        needs[actor.rollout.name] = (actor.rollout.name, f"rollout.name requires it; {lock}")
    attention = (actor.model.get("override_config") or {}).get("attn_implementation", "flash_attention_2")
    if attention == "flash_attention_2" or has_critic(config):
        needs[FLASH_ATTENTION] = ("flash_attn", f"{WHY_FLASH_ATTENTION}; {BUILD_ADVICE}")
    if (backend := actor.rollout.checkpoint_engine.backend) in ("nccl", "nixl", "delta_sharded"):
        why = f"rollout.checkpoint_engine.backend={backend} sends weights with it"
        needs["cupy"] = ("cupy", f"{why}; {lock}")
    if actor.model.get("use_liger"):
        needs["liger_kernel"] = ("liger-kernel", f"actor_rollout_ref.model.use_liger is on; {lock}")
    return needs


def called_tools(settings: RlSettings) -> dict[str, Tool]:
    """Return the tools that the agents call, by name. Starts nothing.

    Raises:
        ConfigError: A tool is not declared, or the tools file is wrong.
    """
    from afm.tools import load_tools

    called: dict[str, Tool] = {}
    for route in settings.routes() if settings.harness is None else ():
        needed = set(route.declared.tool_roles.values())
        agent = f"agent {route.declared.name!r}" + (f" ({route.key})" if route.name else "")
        if needed and route.tools is None:
            raise ConfigError(
                f"{agent} calls {sorted(needed)}, but the run has no tools; set `tools` to a tool YAML"
            )
        tools = {} if route.tools is None else load_tools(route.tools)
        if missing := needed - set(tools):
            source = "tools" if isinstance(route.tools, dict) else route.tools
            raise ConfigError(
                f"{source}: {agent} calls {sorted(missing)}, which are not declared there; add them"
            )
        called |= {name: tool for name, tool in tools.items() if name in needed}
    return called


def _output(settings: RlSettings) -> Iterator[Finding]:
    folder = settings.output_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        text = f"output_dir {settings.output_dir}: {folder} is not writable"
        yield Finding(Level.ERROR, "output", text)


def _offline(settings: RlSettings, env: Mapping[str, str]) -> Iterator[Finding]:
    for name in settings.trackers:
        if (key := _TRACKER_KEYS.get(name)) and not env.get(key):
            yield Finding(Level.OK, "trackers", f"{name}: offline, because {key} is not set")


def _rows(settings: RlSettings, rewards: Rewards, report: Report) -> Rows | None:
    """Read the training and validation rows, and return the training rows."""
    routes = settings.routes()
    by_source = {agent: reward.by_source for agent, reward in rewards.items()}
    trained = report.asked("data", lambda: read_rows(settings.train_files, routes, by_source))
    if trained is not None:
        report.add(*row_findings(trained, routes, "train_files"))
    tested = report.asked("data", lambda: read_rows(settings.val_files, routes, by_source))
    if tested is not None and settings.val_files:
        report.add(*row_findings(tested, routes, "val_files"))
    faults = sum(rows.bad.count + rows.unclear.count for rows in (trained, tested) if rows is not None)
    if trained is not None and not faults:
        prompts = report.asked("prompts", lambda: rl_prompts(settings))
        report.add(*([Finding(Level.OK, "prompts", str(prompts))] if prompts else []))
    return trained


def _engine(settings: RlSettings, config: Any, report: Report) -> None:
    """Run verl's own validation of its configuration. The check of a critic needs the model's files."""
    local = (Path(settings.model) / "tokenizer.json").is_file()
    if report.asked("engine", lambda: _validated(config, with_critic=local)) is not None:
        report.add(Finding(Level.OK, "engine", "verl's own validation accepts the configuration"))


def _validated(config: Any, *, with_critic: bool) -> bool:
    from contextlib import redirect_stdout
    from io import StringIO
    from warnings import catch_warnings, simplefilter

    try:
        with redirect_stdout(StringIO()), catch_warnings():
            simplefilter("ignore")  # verl warns that grpo has no critic
            from omegaconf import OmegaConf
            from verl.trainer.ppo.utils import need_critic, need_reference_policy
            from verl.utils.config import validate_config

            # For adapters it only checks whether vLLM accepts their rank, which it cannot do without vLLM.
            unasked = {} if find_spec("vllm") else {"lora_rank": 0, "lora": {"rank": 0}}
            checked = OmegaConf.merge(config, {"actor_rollout_ref": {"model": unasked}})
            critic = with_critic and need_critic(config)
            validate_config(checked, need_reference_policy(config), critic)
    except Exception as error:  # noqa: BLE001 - verl reports errors as any exception
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        raise ConfigError(f"verl rejects the configuration: {type(error).__name__}: {reason}") from None
    return True


def _hardware(settings: RlSettings, sizes: RunSizes, written: Hardware | None) -> Iterator[Finding]:
    on_cpu = f"{plural(sizes.hardware.world, 'process', 'processes')} on the CPU"
    yield Finding(Level.OK, "hardware", on_cpu if settings.platform == "cpu" else f"{sizes.hardware}")
    if written and (written.nodes, written.gpus) != (sizes.hardware.nodes, sizes.hardware.gpus):
        keys = "verl.trainer.nnodes and n_gpus_per_node, which verl uses"
        yield Finding(
            Level.WARNING, "hardware", f"the recipe's header says {written}; it differs from {keys}"
        )
    yield from cluster_findings(settings, sizes.hardware.nodes)


def _arithmetic(
    settings: RlSettings,
    config: Any,
    sizes: RunSizes,
    rewards: Rewards | None,
    rows: Rows | None,
    report: Report,
) -> None:
    """Sizes of batches, episodes, the judge's bill, memory and disk."""
    shape = report.asked("model", lambda: model_shape(settings.model))
    report.add(*size_findings(config, sizes, shape))
    steps = sizes.steps
    if rows is not None:
        steps = report.asked("steps", lambda: steps_of(config, rows.count))
        if steps is not None:
            report.add(*steps_findings(config, sizes, rows.count, steps))
    if rewards is not None:
        report.add(*engine_findings(sizes, shape, config))
        for route in settings.routes():
            findings = agent_findings(sizes, route.limits, rewards[route.name], config)
            report.add(*(_of_agent(finding, route) for finding in findings))
            if rows is not None:
                _judge(route, rows, sizes, rewards[route.name], steps, report)
    if rewards is not None and rows is not None:
        model = Path(settings.model)
        finding = report.asked("prompts", lambda: prompt_finding(rows, model, sizes.prompt))
        report.add(*([finding] if finding else []))
    if shape is None:
        text = "no estimate, because the model's config.json is not here"
        size = next((size for size in ("32", "3", "1.5") if f"_{size}b" in settings.model.lower()), "7")
        advice = f"to get one, set model=Qwen/Qwen2.5-{size}B-Instruct or another known name"
        if settings.platform == "cpu":
            advice = "fine-tune it first: afm sft CONFIG"
        report.add(Finding(Level.WARNING, "memory", f"{text}; {advice}"))
        return
    here = settings.platform == "cpu" or has_gpu()
    report.add(checkpoint_finding(sizes, shape, settings.output_dir, steps, here=here))
    if settings.platform == "gpu":
        report.add(*memory_findings(sizes, shape))
    elif config.actor_rollout_ref.rollout.name == CPU_ENGINE:
        engine = (config.actor_rollout_ref.rollout.engine_kwargs or {}).get(CPU_ENGINE) or {}
        report.add(cpu_memory_finding(sizes, shape, engine.get("processes", 1)))


def _of_agent(finding: Finding, route: Route) -> Finding:
    """Add the agent's name to a finding, if the run has several agents."""
    return replace(finding, text=f"{route.name}: {finding.text}") if route.name else finding


def _judge(
    route: Route, all_rows: Rows, sizes: RunSizes, reward: RewardSettings, steps: int | None, report: Report
) -> None:
    environment = report.asked("judge", load_environment)
    if environment is None:
        return
    rows = all_rows.by_agent[route.name]
    share = rows.good / max(1, all_rows.good)
    findings = report.asked(
        "judge", lambda: list(judge_findings(rows, sizes, reward, environment, steps, share))
    )
    report.add(*(_of_agent(finding, route) for finding in findings or ()))
    address = judge_address(reward, environment) if rows.scorers["judge"] else None
    if findings:
        report.add(*loopback_findings({}, sizes.hardware.nodes, [address]))
    if findings and address and (why := asyncio.run(unanswered(address))):
        report.add(Finding(Level.WARNING, "judge", f"no answer from {address} ({why})"))
