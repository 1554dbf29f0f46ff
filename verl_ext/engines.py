"""Requirements of each rollout engine: its settings, its environment variables, and the parameters that it accepts.

verl passes ``rollout.engine_kwargs.ENGINE`` to its engine unchecked. An engine that does not know a parameter fails
minutes after the start, in a separate process. This module checks them against the parameters of the releases that we
use (``engine_parameters.yaml``): vLLM's release for CPUs, and those of the GPU locks.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from afm.configuration import read_mapping
from afm.findings import Finding, Level
from verl_ext.algorithms import CPU_ENGINE
from verl_ext.patching import VLLM_ON_CPU

ENGINE = "actor_rollout_ref.rollout.name"
_ROLLOUT = "actor_rollout_ref.rollout"
_GIB = 1 << 30

GPU_RELEASES = {"vllm": "0.24.0", "sglang": "0.5.12"}
"""Releases of the engines in the GPU locks (``requirements/``)."""

SHOW_WEIGHTS = (CPU_ENGINE, "vllm")
"""Engines whose weights :mod:`verl_ext.weight_proof` can compare with the trainer's."""


def cpu_defaults(engine: str | None) -> dict[str, Any]:
    """Return the verl keys that an engine needs on a CPU. A ``+`` adds a key that verl's YAML does not declare."""
    if engine != "vllm":
        return {}
    return {
        f"{_ROLLOUT}.dtype": "float32",
        # vLLM's CPU workers cannot sleep, and compilation takes longer than a tiny run.
        f"{_ROLLOUT}.enforce_eager": True,
        f"{_ROLLOUT}.free_cache_engine": False,
        f"+{_ROLLOUT}.enable_sleep_mode": False,
        # Otherwise vLLM takes half of the machine's memory for its cache and warms up with 8,192 tokens.
        f"+{_ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes": _GIB,
        f"{_ROLLOUT}.max_num_batched_tokens": 2048,
        f"{_ROLLOUT}.max_num_seqs": 64,
    }


def engine_environment(engine: str | None, *, on_cpu: bool) -> dict[str, str]:
    """Return environment variables that an engine reads and verl has no setting for."""
    if engine != "vllm":
        return {}
    values = {"VLLM_NO_USAGE_STATS": "1"}
    # If bound to cores, the threads of engine and trainer share one core while the other one idles.
    return values | ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if on_cpu else {})


@cache
def engine_parameters(engine: str, release: str) -> frozenset[str]:
    """Return the names of the parameters that a release of an engine accepts."""
    _, known = read_mapping(Path(__file__).with_name("engine_parameters.yaml"), "engine parameters")
    return frozenset(known[engine][release])


def release_of(config: Any) -> str | None:
    """Return the release of the engine against which a composed configuration is checked, if there is one."""
    engine = config.actor_rollout_ref.rollout.name
    if engine == "vllm" and config.trainer.device == "cpu":
        return VLLM_ON_CPU.version
    return GPU_RELEASES.get(engine)


def parameter_findings(config: Any) -> Iterator[Finding]:
    """Report parameters that the release of their engine does not accept, each with the closest known one."""
    rollout = config.actor_rollout_ref.rollout
    releases = GPU_RELEASES | {rollout.name: release_of(config)}
    given = [(engine, name) for engine, part in (rollout.engine_kwargs or {}).items() for name in part or ()]
    for engine, name in given:
        if (release := releases.get(engine)) is None or name in (known := engine_parameters(engine, release)):
            continue
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "verl_ext/engine_parameters.yaml lists them"
        if engine == "vllm":
            other = {VLLM_ON_CPU.version, GPU_RELEASES["vllm"]} - {release}
            hint = next(
                (f"release {one} has it" for one in other if name in engine_parameters(engine, one)), hint
            )
        text = (
            f"verl.{_ROLLOUT}.engine_kwargs.{engine}.{name}: {engine} {release} has no such parameter; {hint}"
        )
        yield Finding(Level.ERROR, "engine", text)


def installed_findings(config: Any) -> Iterator[Finding]:
    """Report whether the installed engine is the release against which the configuration is checked."""
    engine, release = config.actor_rollout_ref.rollout.name, release_of(config)
    if release is None:
        return
    on_cpu = config.trainer.device == "cpu"
    package = VLLM_ON_CPU.package if on_cpu else engine
    try:
        installed = version(package)
    except PackageNotFoundError:
        installed = None
    if on_cpu and installed != release:
        state = f"{installed} is installed" if installed else "is not installed"
        text = f"rollout.name={engine} needs {package} {release}; {state}; {VLLM_ON_CPU.advice}"
        yield Finding(Level.ERROR, "packages", text)
    elif installed not in (None, release):
        text = f"{package} {installed} is installed; its parameters were checked against {release}"
        yield Finding(Level.WARNING, "packages", text)
