"""The command: options to servers, their addresses for `afm eval`, an exit status."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from afm.cli.serving.engines import KEY, Engine, Server, Wanted, installed, servers
from afm.errors import ConfigError

_SHORTEST_KEY = 16


def model(
    model: Annotated[Path, typer.Argument(help="Folder of a model, or of a run that left one.")],
    further: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]...", help="Of the engine itself.")
    ] = None,
    engine: Annotated[
        Engine | None, typer.Option(help="By default vllm, else sglang, else our own (CPU).")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Servers, on ports that follow each other.")] = 1,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs of one replica.")] = 1,
    name: Annotated[str | None, typer.Option(help="What clients call it [default: the folder].")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the first replica.")] = 8000,
    start_s: Annotated[float, typer.Option(min=1, help="Seconds to load the model.")] = 1800.0,
    logs: Annotated[Path, typer.Option(help="Folder of PORT.log files.", file_okay=False)] = Path(
        "runs/serve"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, start nothing.")] = False,
) -> None:
    """Serve a model to `afm eval`: starts the engine, waits until it is healthy, prints what to give to afm eval.

    Ctrl-C ends all replicas, as does the end of one of them. Other machines are let in with --host 0.0.0.0 and
    AFM_MODEL_API_KEY only.

    Example: afm serve model models/web_agent_7b --replicas 4 --tensor-parallel 2
    """
    from afm.cli.serving.run import StoppedError, serve_together
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
    from afm.agents import model_folder
    from afm.planning import missing_model_files

    folder = model_folder(model)
    if not folder.is_dir():
        raise ConfigError(f"{model}: no such folder; expected a model's, or that of a run")
    if missing := missing_model_files(folder):
        raise ConfigError(f"{folder}: without {', '.join(missing)}; expected a whole model")
    return folder.resolve()


def _shown(server: Server) -> str:
    variables = {name: "***" if "KEY" in name else value for name, value in server.environment.items()}
    return " ".join([*(f"{name}={value}" for name, value in variables.items()), shlex.join(server.command)])


def _for_eval(planned: list[Server], wanted: Wanted) -> str:
    urls = ",".join(server.url for server in planned)
    words = [f"model={urls}", f"model.name={wanted.name}", f"model.tokenizer={wanted.model}"]
    return shlex.join(["afm", "eval", "CONFIG", *words])
