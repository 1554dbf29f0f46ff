"""Servers in the background: started with a log, found again by a file, stopped gently."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from afm.errors import EngineError
from afm.runs.atomic import replace_text
from tool_servers.shared.control_plan import Plan
from tool_servers.shared.serve import LOG_VARIABLE

_POLL_S = 0.1
_HEALTH_S = 5.0
_SHOWN_LINES = 12
_LISTENING = re.compile(r"^listening on (http://\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Running:
    """A server that was started.

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


class StateFolder:
    """Process files and logs.

    Args:
        folder: Made when it is needed.
        log_bytes: A log that has grown beyond is begun anew.
    """

    def __init__(self, folder: Path, log_bytes: int = 10 << 20) -> None:
        self._folder = folder
        self._log_bytes = log_bytes

    def log(self, name: str) -> Path:
        """The log of a server."""
        return self._folder / f"{name}.log"

    def find(self, name: str) -> Running | None:
        """What was started last and not stopped since; it may have ended by itself."""
        try:
            return Running(**json.loads(self._file(name).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def start(self, plan: Plan, wait_s: float) -> Running:
        """Start a server in this process's working folder and wait until it is healthy.

        Raises:
            EngineError: It ended, or did not become healthy in time; it does not run then.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        log = self.log(plan.name)
        with open(log, "ab", opener=_private) as sink:
            begin = sink.tell()
            process = subprocess.Popen(
                plan.command(),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {LOG_VARIABLE: f"{self._log_bytes}:{log.resolve()}"},
            )
        self._write(Running(plan.name, process.pid, _born(process.pid), "", time.time()))
        try:
            url = self._ready(process, log, begin, wait_s)
        except BaseException:
            _kill_all(process.pid)
            process.wait()
            self.forget(plan.name)
            raise
        running = Running(plan.name, process.pid, _born(process.pid), url, time.time())
        self._write(running)
        return running

    def stop(self, running: Running, wait_s: float) -> bool:
        """Let a server finish what it does and end it; whether it ended by itself within ``wait_s``."""
        gently = _signalled(running, signal.SIGTERM)
        until = time.monotonic() + wait_s
        while running.alive() and time.monotonic() < until:
            time.sleep(_POLL_S)
        gently = not running.alive() and gently
        if running.alive():
            _kill_all(running.pid)
            while running.alive():
                time.sleep(_POLL_S)
        self.forget(running.name)
        return gently

    def forget(self, name: str) -> None:
        """Drop the process file."""
        self._file(name).unlink(missing_ok=True)

    def _ready(self, process: subprocess.Popen[bytes], log: Path, begin: int, wait_s: float) -> str:
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            told = _text_from(log, begin)
            if process.poll() is not None:
                lines = "\n  ".join(told.splitlines()[-_SHOWN_LINES:])
                raise EngineError(f"ended with status {process.returncode}:\n  {lines}")
            listening = _LISTENING.search(told)
            if listening and health(url := _from_here(listening[1])) is not None:
                return url
            time.sleep(_POLL_S)
        raise EngineError(f"is not healthy after {wait_s:g} s; see {log}")

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.pid"

    def _write(self, running: Running) -> None:
        replace_text(self._file(running.name), json.dumps(asdict(running)) + "\n")


def health(url: str) -> dict[str, Any] | None:
    """What the server says about itself when it is well."""
    import httpx

    try:
        answer = httpx.get(f"{url}/health", timeout=_HEALTH_S, trust_env=False)
        told = answer.json() if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
    return told if isinstance(told, dict) else None


def resident_mib(pid: int) -> float:
    """Memory that the process itself holds; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    found = re.search(r"VmRSS:\s+(\d+)", status)
    return int(found[1]) / 1024 if found else 0.0


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _born(pid: int) -> int:
    """Ticks at which a process began; -1 when it does not run (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return -1
    fields = state.rpartition(")")[2].split()
    return -1 if fields[0] in "ZX" else int(fields[19])


def _signalled(running: Running, number: signal.Signals) -> bool:
    if not running.alive():
        return False
    try:
        os.kill(running.pid, number)
    except ProcessLookupError:
        return False
    return True


def _kill_all(pid: int) -> None:
    """The server leads its own group, so its workers end with it."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _text_from(path: Path, begin: int) -> str:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(1 << 20).decode("utf-8", "replace")


def _from_here(url: str) -> str:
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
