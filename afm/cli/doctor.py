"""``afm doctor``: this computer, or the configuration of a run, checked before anything costs time."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.cli.options import TrustOption
from afm.configuration import override_key, read_extended
from afm.errors import AfmError, ConfigError
from afm.findings import Finding, Level, failed
from afm.memory_arithmetic import hardware_from
from afm.palette import terminal_style
from afm.terminal import visible

if TYPE_CHECKING:
    from rich.console import Console


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="YAML of a training, an evaluation or tools, for example configs/eval/gaia.yaml; without one this computer."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, as for `afm sft`, `afm rl` and `afm eval`.")
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Nodes it is meant for [default: verl.trainer.nnodes; for afm sft NNODES, else the recipe's header].",
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of each node [default: NPROC_PER_NODE, else the header].")
    ] = None,
    gpu_gib: Annotated[
        float | None, typer.Option(min=1, help="Memory of one GPU in GiB [default: the header, else 80].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    trust: TrustOption = False,
) -> None:
    """Check this computer (no CONFIG), or a training, an evaluation or tools: what is fine, what would fail, what to do.

    A training: arguments, every row, trackers, lengths, steps, disk, memory of each GPU; for reinforcement learning also
    tools and servers, judge and cost. An evaluation: model or endpoint, tools, data, judge, what its folder holds.
    The exit status is 1 if anything would fail.
    """
    if config is None:
        from afm.cli.doctor_machine import diagnose_machine

        findings, what = diagnose_machine(os.environ), "this computer"
    else:
        what = str(config)
        try:
            findings = _diagnose(config, overrides or [], nodes, gpus, gpu_gib)
        except AfmError as error:  # it cannot be read, or it is not known whose it is
            if not as_json:
                raise
            findings = [Finding(Level.ERROR, "config", " ".join(str(error).split()))]
    if as_json:
        print_json(what, findings)
    else:
        print_table(findings)
    if failed(findings):
        raise typer.Exit(1)


def _diagnose(
    config: Path, overrides: list[str], nodes: int | None, gpus: int | None, gpu_gib: float | None
) -> list[Finding]:
    findings: list[Finding]
    match kind_of(config, overrides):
        case ConfigKind.RL:
            from verl_ext.doctor import AskedHardware
            from verl_ext.doctor import diagnose as diagnose_rl

            findings = diagnose_rl(config, overrides, AskedHardware(nodes, gpus, gpu_gib), os.environ)
        case ConfigKind.SFT:
            from llamafactory_patch.doctor import diagnose as diagnose_sft

            hardware = hardware_from(os.environ, config, nodes, gpus, gpu_gib)
            findings = diagnose_sft(config, overrides, hardware, os.environ)
        case ConfigKind.EVAL:
            from afm.evaluation.doctor import diagnose as diagnose_evaluation

            findings = diagnose_evaluation(config, overrides)
        case ConfigKind.TOOLS:
            from afm.tools.health import diagnose as diagnose_tools

            findings = diagnose_tools(config, overrides, os.environ)
    return findings


class ConfigKind(StrEnum):
    """The command that a configuration is for, or what it declares."""

    SFT = "afm sft"
    RL = "afm rl"
    EVAL = "afm eval"
    TOOLS = "tools"


_KEYS = {
    ConfigKind.RL: frozenset({"train_files", "val_files", "verl", "platform"}),
    ConfigKind.SFT: frozenset(
        {"model_name_or_path", "dataset", "stage", "finetuning_type", "template", "cutoff_len"}
    ),
    ConfigKind.EVAL: frozenset({"benchmark", "data", "rounds"}),
}
"""Keys that one kind alone has."""
_SHARED = frozenset({"rewards", "limits"})
"""Of reinforcement learning and evaluation; the former where nothing else tells."""
_OF_TOOLS = frozenset({"tools", "cassette"})


def kind_of(config: Path, overrides: Sequence[str]) -> ConfigKind:
    """Whose configuration it is; an error where it is of none or of two of them."""
    content = read_extended(config, "settings")
    keys = set(content) | {override_key(override).partition(".")[0] for override in overrides}
    if set(content) <= _OF_TOOLS and isinstance(content.get("tools"), list):
        return ConfigKind.TOOLS
    matches = {kind: sorted(keys & own) for kind, own in _KEYS.items() if keys & own}
    if len(matches) == 1:
        return next(iter(matches))
    if not matches and keys & _SHARED:
        return ConfigKind.RL
    expected = "; ".join(f"`{kind}` ({', '.join(sorted(own))})" for kind, own in _KEYS.items())
    message = f"none of them; it has {sorted(keys)}"
    if matches:
        (first, its), (second, others), *_ = matches.items()
        message = f"both {its[0]!r} of `{first}` and {others[0]!r} of `{second}`"
    raise ConfigError(f"{config}: expected keys of {expected}, or a list of `tools`; found {message}")


_WORDS = {Level.OK: "ok", Level.WARNING: "warn", Level.ERROR: "fail"}
_STYLES = {
    Level.OK: terminal_style("good"),
    Level.WARNING: terminal_style("warn"),
    Level.ERROR: terminal_style("bad"),
}


def print_json(what: str, findings: Sequence[Finding]) -> None:
    """One object: what was looked at, whether it would go well, and every finding."""
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


def print_table(findings: Sequence[Finding], console: Console | None = None) -> None:
    """All findings in their order, and how many there are of each kind."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console(highlight=False)
    if not console.is_terminal:
        for finding in findings:
            print(finding)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=terminal_style("soft"))
    for name, ratio in (("", None), ("what", None), ("why", 3), ("next step", 2)):
        table.add_column(name, ratio=ratio, no_wrap=ratio is None, overflow="fold")
    for finding in findings:
        state = Text(_WORDS[finding.level], _STYLES[finding.level])
        table.add_row(
            state,
            visible(finding.subject),
            Text(visible(finding.why)),
            Text(visible(finding.next_step), "bold"),
        )
    console.print(table)
    counts = Counter(finding.level for finding in findings)
    summary = ", ".join(f"{counts[level]} {word}" for level, word in _WORDS.items() if counts[level])
    console.print(Text(summary, _STYLES[max(counts, key=list(_WORDS).index)] if counts else ""))
