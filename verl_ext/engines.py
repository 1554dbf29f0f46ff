"""Requirements of each rollout engine: its settings, its environment variables, and the parameters that it accepts.

verl passes ``rollout.engine_kwargs.ENGINE`` to its engine unchecked. An engine that does not know a parameter fails
minutes after the start, in a separate process. This module checks them against the parameters of the releases that we
use (``engine_parameters.yaml``): vLLM's release for CPUs, and those of the GPU locks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import Field

from afm.configuration import Settings, read_mapping, validated
from afm.findings import Finding, Level
from afm.models.base import FloatType
from verl_ext.algorithms import CPU_ENGINE
from verl_ext.patching import VLLM_ON_CPU

ENGINE = "actor_rollout_ref.rollout.name"
_ROLLOUT = "actor_rollout_ref.rollout"
_GIB = 1 << 30

GPU_RELEASES = {"vllm": "0.24.0", "sglang": "0.5.12"}
"""Releases of the engines in the GPU locks (``requirements/``)."""

SHOW_WEIGHTS = (CPU_ENGINE, "vllm")
"""Engines whose weights :mod:`verl_ext.weight_proof` can compare with the trainer's."""


class CpuOptions(Settings):
    """The options in ``rollout.engine_kwargs.afm_cpu``."""

    processes: int = Field(default=1, ge=1)
    """Processes per training worker, each with a copy of the model. A small model uses two cores far better with
    two processes than with two threads. Each process needs the memory of the weights and about 0.7 GiB."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads per process. The default divides the machine's cores among the processes."""
    max_batch: int | None = Field(default=None, ge=1)
    """Episodes that a process generates together. The default is ``rollout.max_num_seqs``."""
    dtype: FloatType = "float32"
    """Data type of the weights. ``rollout.dtype`` has no effect, because verl's default is slow on most CPUs."""

    @classmethod
    def of(cls, rollout: Any) -> CpuOptions:
        """Read the options from verl's ``rollout`` section.

        Raises:
            ConfigError: A key is unknown or a value is invalid.
        """
        options = (rollout.engine_kwargs or {}).get(CPU_ENGINE) or {}
        return validated(cls, dict(options), f"actor_rollout_ref.rollout.engine_kwargs.{CPU_ENGINE}")

    @property
    def threads_each(self) -> int | None:
        """Number of threads of a process, ``None`` to keep torch's setting."""
        if self.threads is not None or self.processes == 1:
            return self.threads
        return max(1, (os.cpu_count() or 1) // self.processes)


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
