"""Run ``python -m tool_servers NAME [options]`` to serve in the foreground.

``start``, ``stop``, ``status`` and ``test`` control servers in the background, which pid files identify.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from afm.endpoints.connections import environment_key
from afm.errors import AfmError, ConfigError, EngineError, UsageError, described, suggestion
from afm.processes import receive_interrupts
from afm.runs.atomic import replace_text
from afm.settings import load_settings
from tool_servers.shared.command import (
    KINDS,
    LOG_VARIABLE,
    NotSetUpError,
    checked_command,
    load_server,
    parse_launch,
    serve_command,
)

ROOT = Path(__file__).parents[1]
_VERBS = ("start", "stop", "status", "test")
_POLL_S = 0.1
_HEALTH_S = 5.0
_TRIAL_S = 90.0
_SHOWN_LINES = 12
_LISTENING = re.compile(r"^listening on (http://\S+)$", re.MULTILINE)


class BackgroundServer:
    """The server of one name that was started last and not stopped. It may have exited by itself.

    Attributes:
        known: Whether there is a pid file. It holds ``pid``, ``url``, ``since`` (seconds since the epoch) and ``born``,
            which distinguishes the process from a later one with the same pid.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        self._file = folder / f"{name}.pid"
        self.pid, self.url, self.since, self._born = 0, "", 0.0, 0
        with suppress(OSError, ValueError, KeyError, TypeError):
            state = json.loads(self._file.read_text(encoding="utf-8"))
            self.pid, self.url = state["pid"], state["url"]
            self.since, self._born = state["since"], state["born"]
        self.known = self.pid > 0

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.known and _birth(self.pid) == self._born

    def start(self, command: Sequence[str], wait_s: float, log_bytes: int) -> None:
        """Start the server in this process's working folder and wait until it is healthy.

        Raises:
            EngineError: The server exited, or was not healthy in time and was killed.
        """
        with open(self.log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as sink:
            begin = sink.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {LOG_VARIABLE: f"{log_bytes}:{self.log.resolve()}"},
            )
        self.pid, self.since, self._born = process.pid, time.time(), _birth(process.pid)
        try:
            self._write()
            self.url = self._ready_url(process, begin, wait_s)
        except BaseException:
            self._kill()
            process.wait()
            self.forget()
            raise
        self._write()

    def stop(self, wait_s: float) -> tuple[bool, str]:
        """Let running requests finish and stop the server; after ``wait_s`` kill it, which counts as a failure."""
        began = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        while (killed := self.alive) and time.monotonic() - began < wait_s:
            time.sleep(_POLL_S)
        if killed:
            self._kill()
            while self.alive:
                time.sleep(_POLL_S)
        self.forget()
        return not killed, f"{'killed' if killed else 'stopped'} after {time.monotonic() - began:.1f} s"

    def forget(self) -> None:
        """Delete the pid file."""
        self._file.unlink(missing_ok=True)

    def status(self) -> tuple[bool, str]:
        """Return whether the server is healthy, and its address, age, memory and load as text."""
        state = _health(self.url)
        if state is None:
            return False, f"not healthy, pid {self.pid}, {self.url}; see {self.log}"
        load = "".join(f", {state[key]} {key}" for key in ("running", "waiting") if key in state)
        usage = f"{time.time() - self.since:.0f} s, {_resident_mib(self.pid):.0f} MiB{load}"
        return True, f"healthy, pid {self.pid}, {self.url}, {usage}"

    def test(self) -> tuple[bool, str]:
        """Make a real request; return whether it succeeded, and its result as text."""
        token = environment_key(KINDS[self.name].token)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        began = time.monotonic()
        try:
            with httpx.Client(
                base_url=self.url, headers=headers, timeout=_TRIAL_S, trust_env=False
            ) as client:
                result = load_server(self.name).trial(client)
        except httpx.HTTPStatusError as error:
            return False, f"FAILED: status {error.response.status_code}: {error.response.text[:200]}"
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            return False, f"FAILED: {type(error).__name__}: {error}"
        return True, f"passed in {time.monotonic() - began:.2f} s: {result}"

    def _ready_url(self, process: subprocess.Popen[bytes], begin: int, wait_s: float) -> str:
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            with self.log.open("rb") as file:
                file.seek(begin)
                text = file.read(1 << 20).decode("utf-8", "replace")
            if process.poll() is not None:
                lines = "\n  ".join(text.splitlines()[-_SHOWN_LINES:])
                raise EngineError(f"ended with status {process.returncode}:\n  {lines}")
            if listening := _LISTENING.search(text):
                url = listening[1].replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
                if _health(url) is not None:
                    return url
            time.sleep(_POLL_S)
        raise EngineError(f"is not healthy after {wait_s:g} s; see {self.log}")

    def _write(self) -> None:
        state = {"pid": self.pid, "born": self._born, "url": self.url, "since": self.since}
        replace_text(self._file, json.dumps(state) + "\n")

    def _kill(self) -> None:
        """Kill the server and its workers, which are in its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def main(words: Sequence[str]) -> int:
    """Run a command. Return 0 on success, 1 if a server failed or does not run, 2 for wrong usage."""
    words = words or ["--help"]
    name, *rest = words
    try:
        receive_interrupts()
        if name in KINDS and "--dry-run" in rest:
            print(shlex.join(serve_command(name, [word for word in rest if word != "--dry-run"])))
            return 0
        if name in _VERBS or name.startswith("-"):
            return _control(words)
        _serve(name, rest)
    except (AfmError, OSError) as error:
        print(f"error: {described(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:  # before the server listens; afterwards it finishes its requests
        return 130
    return 0


def _serve(name: str, words: Sequence[str]) -> None:
    launch = parse_launch(name, words, load_settings())
    module = load_server(name)
    if not (hasattr(module, "serve_streams") and module.serve_streams(launch)):
        from tool_servers.shared.serve import serve

        serve(module.open_app(launch), launch.address())


def _control(words: Sequence[str]) -> int:
    end = list(words).index("--") if "--" in words else len(words)
    options = _parser().parse_intermixed_args(words[:end])
    for name in options.names:
        if name not in KINDS:
            raise UsageError(f"no server {name!r}; {suggestion(name, KINDS)}")
    if end < len(words) and (options.verb != "start" or len(options.names) != 1):
        raise UsageError("arguments after -- are for one server: start NAME -- --port 9002")
    options.state.mkdir(parents=True, exist_ok=True)
    with (options.state / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one command at a time
        servers = [BackgroundServer(name, options.state) for name in options.names or KINDS]
        if options.verb == "start":
            return _start(servers, options, words[end + 1 :])
        return _each(servers, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tool_servers/servers.sh",
        description="Control tool servers in the background: all that are set up, or those that you name.",
        epilog="Example: tool_servers/servers.sh start wiki_search -- --index indexes/wiki --port 8000",
    )
    parser.add_argument("verb", choices=_VERBS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(KINDS)}")
    configs, state = ROOT / "configs/servers", ROOT / "runs/servers"
    parser.add_argument("--configs", type=Path, default=configs, help="folder of the servers' YAML files")
    parser.add_argument("--state", type=Path, default=state, help="folder of pid files and logs")
    wait = "seconds until a start fails, or until a stop becomes a kill"
    parser.add_argument("--wait", type=float, default=60.0, help=wait)
    parser.add_argument("--log-mib", type=int, default=10, help="size of a log before it is rotated")
    parser.add_argument("--dry-run", action="store_true", help="start: check everything, start nothing")
    return parser


def _start(servers: list[BackgroundServer], options: argparse.Namespace, words: Sequence[str]) -> int:
    """Check all servers first; if one cannot start, start none."""
    environment = load_settings()
    commands: list[tuple[BackgroundServer, list[str]]] = []
    ports: dict[int, str] = {}
    failed = False
    for server in servers:
        if server.alive:
            _report(server, f"already running, pid {server.pid}, {server.url}")
            continue
        try:
            command, port = checked_command(server.name, options.configs, words, environment)
            if port and ports.setdefault(port, server.name) != server.name:
                raise ConfigError(f"port {port} is also the port of {ports[port]}; choose another")
            commands.append((server, command))
        except NotSetUpError as error:
            failed |= bool(options.names)
            _report(server, f"not set up: {error}")
        except AfmError as error:
            failed = True
            _report(server, f"cannot start: {error}")
    if failed:
        print("error: nothing was started", file=sys.stderr)
        return 1
    for server, command in commands:
        if options.dry_run:
            _report(server, shlex.join(command))
            continue
        try:
            server.start(command, options.wait, options.log_mib << 20)
            _report(server, f"started, pid {server.pid}, {server.url}, log {server.log}")
        except EngineError as error:
            failed = True
            _report(server, f"failed: {error}")
    return int(failed)


def _each(servers: list[BackgroundServer], options: argparse.Namespace) -> int:
    """Stop, inspect or test each server; return 0 if all succeed and, except for a stop, at least one runs."""
    well = ill = 0
    for server in servers:
        if server.alive:
            act: dict[str, Callable[[], tuple[bool, str]]]
            act = {"stop": partial(server.stop, options.wait), "status": server.status, "test": server.test}
            good, text = act[options.verb]()
            well, ill = well + good, ill + (not good)
        else:
            expected = server.known or bool(options.names)
            ill += expected and options.verb != "stop"
            text = _why_not(server, options.verb) if expected or options.verb == "status" else ""
        if text:
            _report(server, text)
    if options.verb == "test" and not well and not ill:
        print("error: no server is running; start one first", file=sys.stderr)
    return 0 if not ill and (well or options.verb == "stop") else 1


def _why_not(server: BackgroundServer, verb: str) -> str:
    """Describe a server that does not run; for a stop, delete its pid file."""
    if verb == "test":
        return "FAILED: not running"
    if verb == "stop":
        server.forget()
    if server.known:
        return f"exited by itself; see {server.log}"
    return "not running, nothing to stop" if verb == "stop" else "stopped"


def _health(url: str) -> dict[str, Any] | None:
    """Return the state that a healthy server reports, or ``None``."""
    try:
        response = httpx.get(f"{url}/health", timeout=_HEALTH_S, trust_env=False)
        state = response.json() if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def _report(server: BackgroundServer, text: str) -> None:
    print(f"{server.name:<17}{text}", flush=True)


def _birth(pid: int) -> int:
    """Return the start time of a process in ticks; -1 if it does not run, or is a zombie without running threads."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return -1
    fields = state.rpartition(")")[2].split()
    ended = fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1)
    return -1 if ended else int(fields[19])


def _resident_mib(pid: int) -> float:
    """Return the resident memory of the process, without its children; 0 if it is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]
    except OSError:
        return 0.0
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
