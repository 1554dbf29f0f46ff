"""``python -m tool_servers start|stop|status|test [NAME ...]``: servers in the background, found again by a pid file."""

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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from afm.errors import AfmError, ConfigError, EngineError, UsageError, suggestion
from afm.runs.atomic import replace_text
from afm.settings import Environment, load_settings
from tool_servers.shared.command import (
    KINDS,
    LOG_VARIABLE,
    NotSetUpError,
    load_server,
    parse_launch,
    serve_command,
)

VERBS = ("start", "stop", "status", "test")
ROOT = Path(__file__).parents[2]
_SHORT_NAMES = {
    "crawl": "crawl_page",
    "search": "web_search",
    "visual": "visual_inspector",
    "wiki": "wiki_search",
}
_POLL_S = 0.1
_HEALTH_S = 5.0
_TRIAL_S = 90.0
_SHOWN_LINES = 12
_LISTENING = re.compile(r"^listening on (http://\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that was started, as its pid file has it.

    Attributes:
        born: When the process began, in the kernel's clock ticks; tells it from a later one of the same number.
        url: Where it is asked from this machine.
        since: Seconds since the epoch.
    """

    name: str
    pid: int
    born: int
    url: str
    since: float

    def alive(self) -> bool:
        """Whether that very process still runs."""
        return _born(self.pid) == self.born


def checked_command(
    name: str, configs: Path, words: Sequence[str], environment: Environment
) -> tuple[list[str], int]:
    """The command that starts ``name`` and its port, once everything that it needs is there.

    Raises:
        NotSetUpError: It has not been configured.
        AfmError: It has, but wrongly: settings, keys, token, or a port that is taken.
    """
    kind = KINDS[name]
    own = ["--http"] if name == "mcp" else []
    if kind.config and (configs / kind.config).exists():
        own += ["--config", str(configs / kind.config)]
    launch = parse_launch(name, [*own, *words], environment)
    load_server(name).check(launch)
    address = launch.address()
    try:
        address.listen().close()
    except ConfigError as error:
        raise ConfigError(f"{error}; stop what listens there, or choose another port") from None
    return serve_command(name, [*own, *words]), address.port


class ServerFolder:
    """Servers in the background, with their pid files and logs in one folder.

    Args:
        log_bytes: A log that has grown beyond is begun anew.
    """

    def __init__(self, folder: Path, log_bytes: int) -> None:
        self._folder, self._log_bytes = folder, log_bytes

    def log(self, name: str) -> Path:
        """The log of a server."""
        return self._folder / f"{name}.log"

    def find(self, name: str) -> RunningServer | None:
        """The server that was started last and not stopped since; it may have ended by itself."""
        try:
            return RunningServer(**json.loads(self._pid_file(name).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def start(self, name: str, command: Sequence[str], wait_s: float) -> RunningServer:
        """Start a server in this process's working folder and wait until it is healthy.

        Raises:
            EngineError: It ended, or did not become healthy in time; it does not run then.
        """
        log = self.log(name)
        with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as sink:
            begin = sink.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {LOG_VARIABLE: f"{self._log_bytes}:{log.resolve()}"},
            )
        running = RunningServer(name, process.pid, _born(process.pid), "", time.time())
        self._write(running)
        try:
            running = replace(running, url=self._ready_url(name, process, begin, wait_s))
        except BaseException:
            _kill_group(process.pid)
            process.wait()
            self.forget(name)
            raise
        self._write(running)
        return running

    def stop(self, running: RunningServer, wait_s: float) -> bool:
        """Let a server finish what it does and end it; whether it ended by itself within ``wait_s``."""
        with suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGTERM)
        until = time.monotonic() + wait_s
        while running.alive() and time.monotonic() < until:
            time.sleep(_POLL_S)
        if in_time := not running.alive():
            self.forget(running.name)
            return in_time
        _kill_group(running.pid)
        while running.alive():
            time.sleep(_POLL_S)
        self.forget(running.name)
        return False

    def forget(self, name: str) -> None:
        """Drop the pid file."""
        self._pid_file(name).unlink(missing_ok=True)

    def _ready_url(self, name: str, process: subprocess.Popen[bytes], begin: int, wait_s: float) -> str:
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            with self.log(name).open("rb") as file:
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
        raise EngineError(f"is not healthy after {wait_s:g} s; see {self.log(name)}")

    def _pid_file(self, name: str) -> Path:
        return self._folder / f"{name}.pid"

    def _write(self, running: RunningServer) -> None:
        replace_text(self._pid_file(running.name), json.dumps(asdict(running)) + "\n")


def main(words: Sequence[str]) -> int:
    """Exit status 0 when all is well, 1 when a server failed or does not run, 2 for wrong usage."""
    end = list(words).index("--") if "--" in words else len(words)
    own, further = words[:end], words[end + 1 :]
    options = _parser().parse_intermixed_args(own)
    names = [_SHORT_NAMES.get(name, name) for name in options.names]
    try:
        for name in names:
            if name not in KINDS:
                raise UsageError(f"no server {name!r}; {suggestion(name, KINDS)}")
        if end < len(words) and (options.verb != "start" or len(names) != 1):
            raise UsageError("arguments after -- go to one server: start NAME -- --port 9002")
        options.state.mkdir(parents=True, exist_ok=True)
        with (options.state / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one command at a time
            folder = ServerFolder(options.state, options.log_mib << 20)
            if options.verb == "start":
                return _start(names, options, further, folder)
            return _each(names, options, folder)
    except AfmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tool_servers/servers.sh",
        description="Tool servers in the background: all that are set up, or those named.",
        epilog="Example: tool_servers/servers.sh start wiki_search -- --index indexes/wiki --port 8000",
    )
    parser.add_argument("verb", choices=VERBS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(KINDS)}")
    configs, state = ROOT / "configs/servers", ROOT / "runs/servers"
    parser.add_argument("--configs", type=Path, default=configs, help="folder of their YAMLs")
    parser.add_argument("--state", type=Path, default=state, help="folder of pid files and logs")
    wait = "seconds until a start has failed, or a stop becomes a kill"
    parser.add_argument("--wait", type=float, default=60.0, help=wait)
    parser.add_argument("--log-mib", type=int, default=10, help="a larger log is begun anew; three are kept")
    parser.add_argument("--dry-run", action="store_true", help="start: check everything, start nothing")
    return parser


def _start(names: list[str], options: argparse.Namespace, words: Sequence[str], folder: ServerFolder) -> int:
    """Check all servers first; when one of them cannot start, none does."""
    environment = load_settings()
    commands: dict[str, list[str]] = {}
    ports: dict[int, str] = {}
    problems = 0
    for name in names or KINDS:
        running = folder.find(name)
        if running is not None and running.alive():
            _report(name, f"runs already, pid {running.pid}, {running.url}")
            continue
        try:
            command, port = checked_command(name, options.configs, words, environment)
            if port and ports.setdefault(port, name) != name:
                raise ConfigError(f"port {port} is that of {ports[port]}, too; choose another")
            commands[name] = command
        except NotSetUpError as error:
            problems += bool(names)
            _report(name, f"not set up: {error}")
        except AfmError as error:
            problems += 1
            _report(name, f"cannot start: {error}")
    if problems:
        print("error: nothing was started", file=sys.stderr)
        return 1
    for name, command in commands.items():
        if options.dry_run:
            _report(name, shlex.join(command))
            continue
        try:
            running = folder.start(name, command, options.wait)
            _report(name, f"started, pid {running.pid}, {running.url}, log {folder.log(name)}")
        except EngineError as error:
            problems += 1
            _report(name, f"failed: {error}")
    return 1 if problems else 0


def _each(names: list[str], options: argparse.Namespace, folder: ServerFolder) -> int:
    """Stop, look at or try each server; 0 when all is well, and, but for a stop, at least one runs."""
    well = ill = 0
    for name in names or KINDS:
        running = folder.find(name)
        alive = running is not None and running.alive()
        if running is None or not alive:
            ended = running is not None
            if options.verb == "stop":
                folder.forget(name)
                text = "does not run" if names else ""
            elif options.verb == "status":
                text = f"has ended by itself; see {folder.log(name)}" if ended else "stopped"
            else:
                text = "FAILED: does not run" if ended or names else ""
            ill += options.verb != "stop" and (ended or bool(names))
        else:
            verb = {"stop": _stop, "status": _status, "test": _try}[options.verb]
            good, text = verb(running, folder, options)
            well, ill = well + good, ill + (not good)
        if text:
            _report(name, text)
    if options.verb == "test" and not well and not ill:
        print("error: no server runs; start one first", file=sys.stderr)
    return 0 if not ill and (well or options.verb == "stop") else 1


def _stop(running: RunningServer, folder: ServerFolder, options: argparse.Namespace) -> tuple[bool, str]:
    began = time.monotonic()
    in_time = folder.stop(running, options.wait)
    return in_time, f"{'stopped' if in_time else 'killed'} after {time.monotonic() - began:.1f} s"


def _status(running: RunningServer, folder: ServerFolder, _: argparse.Namespace) -> tuple[bool, str]:
    state = _health(running.url)
    if state is None:
        return False, f"not healthy, pid {running.pid}, {running.url}; see {folder.log(running.name)}"
    load = "".join(f", {state[key]} {key}" for key in ("running", "waiting") if key in state)
    usage = f"{time.time() - running.since:.0f} s, {_resident_mib(running.pid):.0f} MiB{load}"
    return True, f"healthy, pid {running.pid}, {running.url}, {usage}"


def _try(running: RunningServer, _: ServerFolder, __: argparse.Namespace) -> tuple[bool, str]:
    """Ask a server for a piece of real work."""
    token = KINDS[running.name].secret(load_settings())
    client = httpx.Client(
        base_url=running.url,
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=_TRIAL_S,
        trust_env=False,
        event_hooks={"response": [_expect_success]},
    )
    began = time.monotonic()
    try:
        with client:
            result = load_server(running.name).trial(client)
    except httpx.HTTPStatusError as error:
        return False, f"FAILED: status {error.response.status_code}: {error.response.text[:200]}"
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        return False, f"FAILED: {type(error).__name__}: {error}"
    return True, f"passed in {time.monotonic() - began:.2f} s: {result}"


def _expect_success(response: httpx.Response) -> None:
    response.read()
    response.raise_for_status()


def _health(url: str) -> dict[str, Any] | None:
    """What a server says about itself when it is well."""
    try:
        response = httpx.get(f"{url}/health", timeout=_HEALTH_S, trust_env=False)
        state = response.json() if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def _report(name: str, text: str) -> None:
    print(f"{name:<17}{text}", flush=True)


def _born(pid: int) -> int:
    """Ticks at which a process began; -1 when it does not run. A zombie does not, once all its threads have let go."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return -1
    fields = state.rpartition(")")[2].split()
    ended = fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1)
    return -1 if ended else int(fields[19])


def _resident_mib(pid: int) -> float:
    """Memory that the process itself holds; 0 when it is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]
    except OSError:
        return 0.0
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def _kill_group(pid: int) -> None:
    """The server leads its own group, so its workers end with it."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
