"""Run a harness's program in the bubblewrap sandbox, where it reaches only the gateway, through a Unix socket.

The jail is the one for model-written code (:mod:`afm.sandbox.jails`) with two differences. Its network namespace has a
loopback device, and :mod:`afm.harness.inside` forwards a port on it to the socket. Programs may start other programs.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

from afm.harness.program import NO_VERDICT, TAIL_CHARACTERS, ProgramEnd, ProgramRun
from afm.harness.settings import HarnessSettings
from afm.sandbox import ExitReason, RunResult, SandboxLimits, SandboxSettings
from afm.sandbox.jails import BubblewrapSandbox
from afm.sandbox.run import memory_file
from afm.sandbox.seccomp import filter_program

PORT = 8000
ORIGIN = f"http://127.0.0.1:{PORT}"
"""Address of the gateway for programs in the jail."""
_SHOWN, _SOCKET = "/harness", "/harness/gateway.sock"
_TASK, _VERDICT = "/tmp/task.json", "/tmp/verdict.json"
_ROOM = SandboxLimits(
    memory_bytes=4 << 30, file_bytes=64 << 20, stdin_bytes=16 << 20, processes=256, open_files=512
)
"""Default limits. They are larger than those of model-written code, because an agent loads its packages."""
_JSON_GROWTH = 6
"""Most characters that one character takes in JSON."""


class HarnessJail(BubblewrapSandbox):
    """Sandbox for the program of one harness.

    Files that the command names appear below ``/harness``. They are read when the jail is created.

    Args:
        settings: The section ``harness``, with ``sandbox`` enabled.
        gateway: Unix socket of the gateway, which the sandbox's user must be able to reach.
    """

    def __init__(self, settings: HarnessSettings, gateway: Path) -> None:
        own = settings.sandbox if isinstance(settings.sandbox, SandboxSettings) else SandboxSettings()
        super().__init__(own.model_copy(update={"max_parallel": settings.concurrency}))
        self._harness, self._gateway = settings, gateway
        self._files = {
            word: f"{_SHOWN}/{number}/{Path(word).name}"
            for number, word in enumerate(settings.command)
            if Path(word).is_absolute() and Path(word).is_file() and number
        }
        self._contents = {inside: Path(word).read_bytes() for word, inside in self._files.items()}
        bounds = own.limits if "limits" in own.model_fields_set else _ROOM
        output = _JSON_GROWTH * 3 * settings.max_output_bytes + (1 << 16)
        self._bounds = bounds.model_copy(
            update={"wall_s": settings.timeout_s, "output_bytes": output}
            | ({} if bounds is not _ROOM else {"cpu_s": max(5, math.ceil(settings.timeout_s))})
        )

    async def run_program(self, env: Mapping[str, str], task: bytes) -> ProgramRun:
        """Run the program once.

        Raises:
            SandboxUnavailableError: This machine has no isolation.
        """
        order = {
            "words": [self._files.get(word, word) for word in self._harness.command],
            "env": {**env, "AFM_TASK": _TASK, "AFM_VERDICT": _VERDICT},
            "task": task.decode("utf-8", "replace"),
            "task_file": _TASK,
            "verdict_file": _VERDICT,
            "socket": _SOCKET,
            "port": PORT,
            "limit": self._harness.max_output_bytes,
        }
        code = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
        return _run_of(await self.run(code, json.dumps(order), self._bounds))

    def _system_calls(self) -> bytes:
        return filter_program(networks=True)

    def _shown(self, files: contextlib.ExitStack) -> tuple[list[str], tuple[int, ...]]:
        words, descriptors = ["--ro-bind", str(self._gateway), _SOCKET], []
        for inside, content in self._contents.items():
            descriptors.append(memory_file(content, files))
            words += ("--perms", "0444", "--file", str(descriptors[-1]), inside)
        return words, tuple(descriptors)


_ENDS = {ExitReason.TIMEOUT: ProgramEnd.TIMEOUT, ExitReason.OUTPUT: ProgramEnd.OUTPUT}


def _run_of(result: RunResult) -> ProgramRun:
    if result.reason is not ExitReason.OK:
        end = _ENDS.get(result.reason, ProgramEnd.CRASHED)
        message = f"{result.stderr}\nthe sandbox ended it: {result.reason}"
        return ProgramRun(end, "", message, result.exit_status, result.wall_s)
    left = json.loads(result.stdout)
    end = ProgramEnd.CRASHED if left["status"] else ProgramEnd.DONE
    return ProgramRun(
        ProgramEnd.OUTPUT if left["cut"] else end,
        left["stdout"],
        left["stderr"][-TAIL_CHARACTERS:],
        left["status"],
        result.wall_s,
        verdict=left["verdict"],
        verdict_fault="" if left["readable"] else NO_VERDICT,
    )
