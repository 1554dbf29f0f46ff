"""How each engine is told to serve a model so that evaluations get exactly what was sampled."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from afm.errors import ConfigError, UsageError

KEY = "AFM_MODEL_API_KEY"


class Engine(StrEnum):
    """What serves."""

    VLLM = "vllm"
    SGLANG = "sglang"
    OWN = "own"
    """The in-process model of this project behind HTTP: for CPUs, and for small models."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to serve, and how.

    Attributes:
        model: Folder with config.json, weights and tokenizer.
        name: What clients call it.
        port: Of the first replica; the others follow.
        tensor_parallel: GPUs of one replica.
        further: Arguments of the engine's own.
    """

    model: Path
    name: str
    host: str
    port: int
    replicas: int
    tensor_parallel: int
    further: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Server:
    """One replica.

    Attributes:
        environment: Beside the one it inherits.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    host: str
    port: int

    @property
    def url(self) -> str:
        """Where clients of this machine reach it."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def installed() -> Engine:
    """The best engine that is there: vLLM, SGLang, else our own."""
    if shutil.which("vllm"):
        return Engine.VLLM
    return Engine.SGLANG if find_spec("sglang") else Engine.OWN


def servers(
    engine: Engine, wanted: Wanted, *, devices: Sequence[str], threads: int, key: str | None
) -> list[Server]:
    """The processes to start.

    Args:
        devices: GPUs that may be used, as CUDA_VISIBLE_DEVICES names them; empty when nobody says.
        threads: CPU threads of this machine.
        key: What clients must send; our servers and vLLM read it from the environment.

    Raises:
        UsageError: More GPUs are needed than there are, or tensor parallelism without an engine for it.
        ConfigError: The engine cannot keep the key secret.
    """
    width = wanted.tensor_parallel
    if engine is Engine.OWN and width > 1:
        raise UsageError(
            "--tensor-parallel: our own server uses one device; install vLLM or SGLang, or leave it out"
        )
    if engine is Engine.SGLANG and key is not None and wanted.host not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(
            f"--host {wanted.host}: SGLang takes a key on its command line only, where every user of the machine reads "
            "it; listen on 127.0.0.1 behind a proxy or a tunnel, or use vLLM"
        )
    needed = wanted.replicas * width
    if devices and engine is not Engine.OWN and needed > len(devices):
        raise UsageError(
            f"{wanted.replicas} replicas x {width} GPUs are {needed}, got {len(devices)} (CUDA_VISIBLE_DEVICES); "
            "lower --replicas or --tensor-parallel"
        )
    found = []
    for number in range(wanted.replicas):
        port = wanted.port + number
        environment: dict[str, str] = {}
        if engine is Engine.OWN:
            environment["OMP_NUM_THREADS"] = str(max(1, threads // wanted.replicas))
        elif devices or wanted.replicas > 1:
            own = (
                devices[number * width :][:width]
                if devices
                else map(str, range(number * width, (number + 1) * width))
            )
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        if engine is Engine.VLLM and key is not None:
            environment["VLLM_API_KEY"] = key
        found.append(Server(_command(engine, wanted, port), environment, wanted.host, port))
    return found


def _command(engine: Engine, wanted: Wanted, port: int) -> tuple[str, ...]:
    model, width = str(wanted.model), str(wanted.tensor_parallel)
    words: tuple[str, ...]
    place = ("--host", wanted.host, "--port", str(port))
    match engine:
        case Engine.VLLM:
            # Log-probabilities of the distribution that was sampled from, temperature applied.
            words = ("vllm", "serve", model, *place, "--served-model-name", wanted.name)
            words += ("--tensor-parallel-size", width, "--logprobs-mode", "processed_logprobs")
        case Engine.SGLANG:
            words = (sys.executable, "-m", "sglang.launch_server", "--model-path", model, *place)
            words += ("--served-model-name", wanted.name, "--tp-size", width)
        case Engine.OWN:
            words = (sys.executable, "-P", "-m", "tool_servers.model", "--model", model, *place)
            words += ("--name", wanted.name)
    return (*words, *wanted.further)
