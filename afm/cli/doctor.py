"""``afm doctor``: check this computer or the configuration of a run before it costs time."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.cli.options import TrustOption, overrides_argument
from afm.errors import AfmError, ConfigError, UsageError, no_such_file
from afm.file_kinds import (
    AGENT_FILE,
    CODE_SERVER_FILE,
    EVAL_FILE,
    FILTER_FILE,
    REWARD_FILE,
    RL_FILE,
    SFT_FILE,
    TEAM_FILE,
    TOOLS_FILE,
    FileKind,
    kind_of,
    shipped_near,
    starter_command,
)
from afm.findings import Finding, Level, Report, failed, has_gpu
from afm.memory_arithmetic import hardware_from
from afm.palette import terminal_style
from afm.terminal import ProgressView, afm_command, plural, visible

if TYPE_CHECKING:
    from rich.console import Console


_CHECKED = "YAML of a training run, an evaluation, tools, an agent, a reward, a team or filters"


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(help=f"{_CHECKED} [default: this computer]."),
    ] = None,
    overrides: Annotated[
        list[str] | None, overrides_argument("Overrides, as for `afm sft`, `afm rl` and `afm eval`.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Nodes of the run [default: for afm rl verl.trainer.nnodes; for afm sft NNODES, else the YAML's header].",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs per node [default: NPROC_PER_NODE, else the YAML's header]."),
    ] = None,
    gpu_gib: Annotated[
        float | None,
        typer.Option(min=1, help="Memory of one GPU in GiB [default: the YAML's header, else 80]."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    trust: TrustOption = False,
) -> None:
    """Check this computer or a YAML, and report what would fail.

    Each finding has its next step. For a training run the command checks arguments, every row, trackers, lengths, steps,
    disk and GPU memory. For reinforcement learning it also checks tools, servers, judge and cost. For an evaluation it
    checks model or endpoint, tools, data, judge and output_dir. The exit status is 1 if anything would fail.
    """
    view = ProgressView(sys.stderr)
    report = Report() if as_json else Report(lambda subject: view.show(f"checking: {subject}"))
    command = ""
    if config is None:
        from afm.cli.doctor_machine import diagnose_machine

        _refuse_sizes(None, None, nodes, gpus, gpu_gib)
        findings, what = diagnose_machine(os.environ, report), "this computer"
        command = _first_command()
    else:
        what = str(config)
        try:
            kind = _kind_to_check(config, overrides or [])
            _refuse_sizes(config, kind, nodes, gpus, gpu_gib)
            _refuse_two_counts(overrides or [], nodes, gpus)
            command = next_command(kind, config, overrides or [], nodes, gpus)
            findings = _diagnose(kind, config, overrides or [], (nodes, gpus, gpu_gib), report)
        except AfmError as error:  # the file cannot be read, or its kind is unknown
            if not as_json:
                raise
            findings = [Finding(Level.ERROR, "config", " ".join(str(error).split()))]
    if as_json:
        print_json(what, findings)
    else:
        view.clear()
        print_table(findings, command)
    if failed(findings):
        raise typer.Exit(1)


def _first_command() -> str:
    """Return what a new user can do on this computer."""
    if has_gpu():
        return f"{afm_command()} list recipes"
    if Path("runs/quickstart/rl").is_dir():
        return f"{afm_command()} init my_task"
    return "./quickstart.sh" if Path("quickstart.sh").is_file() else f"{afm_command()} quickstart"


def _refuse_sizes(
    config: Path | None, kind: FileKind | None, nodes: int | None, gpus: int | None, gpu_gib: float | None
) -> None:
    """Refuse the options that only a training run reads."""
    options = {"--nodes": nodes, "--gpus": gpus, "--gpu-gib": gpu_gib}
    sizes = " ".join(f"{name} {value:g}" for name, value in options.items() if value is not None)
    if sizes and kind is None:
        raise UsageError(f"{sizes}: no YAML to check; give the one of the run: afm doctor CONFIG {sizes}")
    if sizes and kind is not None and kind not in (SFT_FILE, RL_FILE):
        raise UsageError(f"{sizes}: {config} is {kind.name}, which needs no GPUs; leave the option out")


def _refuse_two_counts(overrides: Sequence[str], nodes: int | None, gpus: int | None) -> None:
    """Refuse an option whose key of verl has another value: the run would take the key, and the check the option."""
    for option, key, count in (("nodes", "nnodes", nodes), ("gpus", "n_gpus_per_node", gpus)):
        for override in overrides:
            name, _, value = override.partition("=")
            if count is not None and name.strip() == f"verl.trainer.{key}" and value.strip() != str(count):
                raise UsageError(f"--{option} {count}: {override} differs; leave one of them out")


def _diagnose(
    kind: FileKind,
    config: Path,
    overrides: list[str],
    sizes: tuple[int | None, int | None, float | None],
    report: Report,
) -> list[Finding]:
    match kind:
        case _ if kind is RL_FILE:
            from verl_ext.doctor import AskedHardware
            from verl_ext.doctor import diagnose as diagnose_rl

            return diagnose_rl(config, overrides, AskedHardware(*sizes), os.environ, report)
        case _ if kind is SFT_FILE:
            from llamafactory_patch.doctor import diagnose as diagnose_sft

            hardware = hardware_from(os.environ, config, *sizes)
            return diagnose_sft(config, overrides, hardware, os.environ, report)
        case _ if kind is EVAL_FILE:
            from afm.evaluation.doctor import diagnose as diagnose_evaluation

            return diagnose_evaluation(config, overrides, report)
        case _ if kind is AGENT_FILE:
            from afm.tools.health import diagnose_agent

            return diagnose_agent(config, overrides, report)
        case _ if kind is TEAM_FILE:
            return _diagnose_team(config, overrides, report)
        case _ if kind in (CODE_SERVER_FILE, REWARD_FILE, FILTER_FILE):
            if overrides:
                raise UsageError(f"{overrides[0]!r}: {config} is {kind.name}, which takes no overrides")
            checks = {REWARD_FILE: _diagnose_reward, FILTER_FILE: _diagnose_filters}
            return checks.get(kind, _diagnose_code_server)(config, report)
        case _:
            from afm.tools.health import diagnose as diagnose_tools

            return diagnose_tools(config, overrides, os.environ, report)


def _diagnose_reward(config: Path, report: Report) -> list[Finding]:
    """Load a reward and import its scorers. Nothing is scored."""
    from afm.rewards import load_reward

    if reward := report.asked("reward", lambda: load_reward(config)):
        own = ", ".join(f"{source}: {name}" for source, name in reward.settings.by_source.items())
        text = f"formula {reward.settings.formula}; {own or 'the shipped scorers by data_source'}"
        report.add(Finding(Level.OK, "reward", f"{text}. No answer was scored"))
    return report.findings


def _diagnose_team(config: Path, overrides: Sequence[str], report: Report) -> list[Finding]:
    """Open a team and its tools as `afm data distill` does. No member is asked."""
    from afm.cli.distill import opened_team

    async def opened() -> None:
        async with opened_team(config, None, None, 0, overrides) as (team, spec, tools, _):
            report.add(Finding(Level.OK, "team", f"{team.name}, for agent {spec.name}. No member was asked"))
            report.add(Finding(Level.OK, "tools", f"{', '.join(sorted(tools)) or 'none'}. None was called"))

    report.asked("team", lambda: asyncio.run(opened()))
    return report.findings


def _diagnose_filters(config: Path, report: Report) -> list[Finding]:
    """Load filters, and build them if their agent is known."""
    from afm.agents import load_agent
    from afm.distill.filters.registry import build_stages, load_plan

    if plan := report.asked("filters", lambda: load_plan(config)):
        text = ", ".join(stage.name for stage in plan.stages)
        beside = config.with_name("agent.yaml")
        if agent := plan.agent or (str(beside) if beside.is_file() else ""):
            built = report.asked("filters", lambda: build_stages(plan, load_agent(agent)))
            if built is None:
                return report.findings
            text += f", built for {agent}"
        report.add(Finding(Level.OK, "filters", f"{text}. No row was filtered"))
    return report.findings


def _diagnose_code_server(config: Path, report: Report) -> list[Finding]:
    """Check the file of a code server, and run one program in its sandbox."""
    from afm.configuration import read_file
    from afm.sandbox import open_sandbox
    from afm.sandbox.base import SandboxSettings
    from afm.tools.code import CodeTool
    from afm.tools.health import tool_troubles
    from tool_servers.code import CodeServerSettings

    ours, inner = (set(kind.model_fields) for kind in (CodeServerSettings, SandboxSettings))
    if outside := sorted(set(read_file(config)) & (inner - ours)):
        text = f"{config}: {', '.join(outside)}: settings of the sandbox; write them under `sandbox:`"
        report.add(Finding(Level.ERROR, "keys", text))
    elif settings := report.asked("keys", lambda: CodeServerSettings.read(config)):
        report.add(Finding(Level.OK, "keys", "this is a sandbox server's file, and its settings are valid"))
        report.checking("sandbox")
        tool = CodeTool(open_sandbox(**settings.sandbox.options()))
        trouble = asyncio.run(tool_troubles([tool])).get(tool.name)
        text = f"{trouble}; see docs/sandbox.md" if trouble else "it runs programs on this machine"
        report.add(Finding(Level.ERROR if trouble else Level.OK, "sandbox", text))
    return report.findings


def next_command(
    kind: FileKind, config: Path, overrides: Sequence[str], nodes: int | None, gpus: int | None
) -> str:
    """Return the command that uses a file in which no fault was found, on the nodes and GPUs that were checked."""
    if starter := starter_command(kind, config, afm_command()):
        return starter
    if kind is REWARD_FILE:
        return f"{afm_command()} reward --attack --rewards {shlex.quote(str(config))}"
    if kind in (TEAM_FILE, FILTER_FILE):
        return kind.use_of(config).removeprefix("run ").replace("afm", afm_command(), 1)
    if kind is TOOLS_FILE:
        beside = config.with_name("eval.yaml")
        recipe = shlex.quote(str(beside)) if beside.is_file() else "EVAL.yaml"
        return f"{afm_command()} eval {recipe} tools={shlex.quote(str(config))} model=DIR"
    if kind is AGENT_FILE:
        from afm.agents import load_agent
        from afm.tools.registry import tools_beside

        own = tools_beside(spec, config) if (spec := load_agent(config)).tool_roles else None
        return f"{afm_command()} ask --agent {shlex.quote(str(config))} --model DIR" + (
            f" --tools {shlex.quote(str(own))}" if own else ""
        )
    if kind is CODE_SERVER_FILE:
        return f"{afm_command()} serve code --config {shlex.quote(str(config))}"
    words, before = [str(config), *overrides], ""
    if kind is RL_FILE:
        from verl_ext.doctor import AskedHardware

        words += [size for size in AskedHardware(nodes, gpus).overrides() if size not in overrides]
    elif kind is SFT_FILE:
        several = f"NNODES={nodes} NODE_RANK=RANK MASTER_ADDR=HOST " if nodes and nodes > 1 else ""
        before = several + (f"NPROC_PER_NODE={gpus} " if gpus else "")
    command = {SFT_FILE: "sft", RL_FILE: "rl", EVAL_FILE: "eval"}[kind]
    return f"{before}{afm_command()} {command} {shlex.join(words)}"


_SHARED = frozenset({"rewards", "limits"})
"""Keys of both reinforcement learning and evaluation. A file with no other keys counts as reinforcement learning."""


def _kind_to_check(config: Path, overrides: Sequence[str]) -> FileKind:
    """Return the kind of a file. A kind that is not checked, or two kinds, is an error."""
    from afm.configuration import override_key, read_extended

    if not config.is_file():
        state = "is a folder" if config.is_dir() else no_such_file(config)
        near = "" if config.is_dir() else shipped_near(str(config), "sft", "rl", "eval")
        if near and ("(" not in state or not config.suffix):
            state = f"no such file{near}"
        raise UsageError(f"CONFIG {config}: {state}; expected: {_CHECKED}")
    other = _kind_through_bases(config)
    if other in (AGENT_FILE, CODE_SERVER_FILE, REWARD_FILE, TEAM_FILE, FILTER_FILE):
        return other
    if other is not None and other not in (RL_FILE, SFT_FILE, EVAL_FILE, TOOLS_FILE):
        raise ConfigError(
            f"{config}: this is {other.name}, which afm doctor does not check; {other.use_of(config)}"
        )
    content = read_extended(config, "settings")
    typed = dict.fromkeys(override_key(override).partition(".")[0] for override in overrides)
    data = {**typed, **content}
    if set(content) <= {"tools", "cassette"} and isinstance(content.get("tools"), list):
        return TOOLS_FILE
    runs = (RL_FILE, SFT_FILE, EVAL_FILE)
    matches = [kind for kind in runs if kind.matches(data)]
    if len(matches) == 1:
        return matches[0]
    if not matches and _SHARED & set(data):
        return RL_FILE
    expected = "; ".join(f"{kind.name} ({', '.join(sorted(kind.keys))})" for kind in runs)
    message = f"none of them; it has {sorted(data)}"
    if matches:
        first, second = ((sorted(kind.keys & set(data))[0], kind.name) for kind in matches[:2])
        message = f"both {first[0]!r} of {first[1]} and {second[0]!r} of {second[1]}"
    raise ConfigError(f"{config}: expected keys of {expected}, or a list of `tools`; found {message}")


def _kind_through_bases(config: Path, seen: frozenset[Path] = frozenset()) -> FileKind | None:
    """Return the kind of a file, or of the first file that it extends if its own keys do not decide."""
    from afm.agents.load import shipped_agents
    from afm.configuration import read_file

    data = read_file(config)
    kind, names = kind_of(data), data.get("extends")
    if kind is not None or not names or config.resolve() in seen:
        return kind or (AGENT_FILE if "roles" in data else None)  # an agent may lack its `transitions`
    base = str(names[0] if isinstance(names, list) else names)
    if base in shipped_agents() and not (config.parent / base).exists():
        return AGENT_FILE
    return _kind_through_bases(config.parent / base, seen | {config.resolve()})


_WORDS = {Level.OK: "ok", Level.INFO: "info", Level.WARNING: "warn", Level.ERROR: "fail"}
_STYLES = {
    Level.OK: terminal_style("good"),
    Level.INFO: terminal_style("soft"),
    Level.WARNING: terminal_style("warn"),
    Level.ERROR: terminal_style("bad"),
}


def print_json(what: str, findings: Sequence[Finding]) -> None:
    """Print one object: what was checked, whether it would work, and every finding."""
    rows = [
        {
            "status": _WORDS[finding.level],
            "subject": finding.subject,
            "why": finding.why,
            "next_step": finding.next_step,
        }
        for finding in findings
    ]
    print(json.dumps({"checked": what, "ok": not failed(findings), "findings": rows}, indent=2))


def _summary(findings: Sequence[Finding], command: str) -> str:
    counts = Counter(finding.level for finding in findings)
    names = {"error": counts[Level.ERROR], "warning": counts[Level.WARNING]}
    found = ", ".join(plural(count, name) for name, count in names.items() if count)
    if count := counts[Level.ERROR]:
        return f"{found}: fix the {'error' if count == 1 else 'errors'} first"
    return f"{found or 'no fault found'}; next: {command}"


def print_table(findings: Sequence[Finding], command: str, console: Console | None = None) -> None:
    """Print all findings in order, the number of faults, and what to do next: ``command`` if nothing would fail."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console(highlight=False)
    if not console.is_terminal:
        for finding in findings:
            print(finding)
        print(_summary(findings, command))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=terminal_style("soft"))
    for name, ratio in (("", None), ("what", None), ("why", 3), ("next step", 2)):
        table.add_column(name, ratio=ratio, no_wrap=ratio is None, overflow="fold")
    for finding in findings:
        state = Text(finding.level.value, _STYLES[finding.level])
        table.add_row(
            state,
            visible(finding.subject),
            Text(visible(finding.why)),
            Text(visible(finding.next_step), "bold"),
        )
    console.print(table)
    worst = max((finding.level for finding in findings), key=list(_WORDS).index, default=Level.OK)
    console.print(Text(visible(_summary(findings, command)), _STYLES[worst]))
