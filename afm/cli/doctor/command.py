"""The command: which kind of configuration it is, who looks at it, and the exit status."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Annotated

import typer

from afm.cli.doctor.kinds import Kind, kind_of
from afm.errors import AfmError
from afm.planning import Finding, Level, failed, hardware_from

SFT_DOCTOR = "llamafactory_patch.doctor"
RL_DOCTOR = "verl_ext.doctor"


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
) -> None:
    """Check this computer (no CONFIG), or a training, an evaluation or tools: what is fine, what would fail, what to do.

    A training: arguments, every row, trackers, lengths, steps, disk, memory of each GPU; for reinforcement learning also
    tools and servers, judge and cost. An evaluation: model or endpoint, tools, data, judge, what its folder holds.
    The exit status is 1 if anything would fail.
    """
    if config is None:
        from afm.cli.doctor.machine import diagnose_machine

        findings, what = diagnose_machine(os.environ), "this computer"
    else:
        what = str(config)
        try:
            findings = _diagnosed(config, overrides or [], nodes, gpus, gpu_gib)
        except AfmError as error:  # it cannot be read, or it is not known whose it is
            if not as_json:
                raise
            findings = [Finding(Level.ERROR, "config", " ".join(str(error).split()))]
    from afm.cli.doctor.shown import print_json, print_table

    if as_json:
        print_json(what, findings)
    else:
        print_table(findings)
    if failed(findings):
        raise typer.Exit(1)


def _diagnosed(
    config: Path, overrides: list[str], nodes: int | None, gpus: int | None, gpu_gib: float | None
) -> list[Finding]:
    findings: list[Finding]
    match kind_of(config, overrides):
        case Kind.RL:
            checks = importlib.import_module(RL_DOCTOR)
            asked = checks.AskedHardware(nodes, gpus, gpu_gib)
            findings = checks.diagnose(config, overrides, asked, os.environ)
        case Kind.SFT:
            checks = importlib.import_module(SFT_DOCTOR)
            hardware = hardware_from(os.environ, config, nodes, gpus, gpu_gib)
            findings = checks.diagnose(config, overrides, hardware, os.environ)
        case Kind.EVAL:
            from afm.evaluation.doctor import diagnose as look_at_evaluation

            findings = look_at_evaluation(config, overrides)
        case Kind.TOOLS:
            from afm.tools.doctor import diagnose as look_at_tools

            findings = look_at_tools(config, overrides, os.environ)
    return findings
