"""Worker processes for work that may never end: one JSON line in, one out, killed at a time limit.

Each worker has its own pipes, so a killed worker leaves no shared lock and no partial message. Nothing is pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from afm.errors import RewardError

_START_S = 120.0
_LAST_BREATH_S = 5.0
_REQUESTS_PER_WORKER = 2000  # caches only grow


class WorkerCrashError(RewardError):
    """The worker died during a request."""


class WorkerCpuError(WorkerCrashError):
    """The request used up the CPU time that :func:`limit_cpu` allows."""


class WorkerKilledError(RewardError):
    """A signal from outside ended the worker, for example because the machine ran out of memory."""


class WorkerTimeoutError(RewardError, TimeoutError):
    """The worker was killed at its wall-clock limit."""


def limit_cpu(seconds: float) -> None:
    """End this process after ``seconds`` more of CPU time, even in C code. 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends a process that does not handle it


class WorkerPool:
    """Worker processes that each serve one request at a time.

    They start on demand and are replaced when they die. Any event loop may send requests. Each request occupies one
    thread, which waits for its worker. A fork of this process gets its own workers.

    Args:
        module: Module that a worker runs with ``python -m``. It prints one line when it is ready, and then one line of
            JSON for each line of JSON that it reads.
        size: Number of workers.
        arguments: Command line arguments of the module.
    """

    def __init__(self, module: str, size: int, arguments: tuple[str, ...] = ()) -> None:
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._size = size
        self._closed = False
        self._crew = _Crew(self._command, size)

    async def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the reply to ``request``. ``timeout_s`` counts from the moment a worker takes the request.

        Raises:
            WorkerTimeoutError: There was no reply in time, and the worker was killed.
            WorkerCpuError: The worker's own CPU limit ended it.
            WorkerCrashError: The worker died during the request.
            WorkerKilledError: A signal from outside ended the worker.
            RewardError: No worker can be started, or the pool is closed.
        """
        line = json.dumps(request).encode()
        loop = asyncio.get_running_loop()
        crew = self._current()
        try:
            return await loop.run_in_executor(crew.threads, crew.ask, line, timeout_s)
        except RuntimeError as error:
            if isinstance(error, RewardError):
                raise
            raise RewardError(f"the workers are closed: {error}") from None

    async def close(self) -> None:
        """Kill the workers. Running requests end with an error."""
        crew = self._current()
        self._closed = True
        crew.threads.shutdown(wait=False, cancel_futures=True)
        for worker in crew.workers:
            worker.kill()
        await asyncio.to_thread(crew.threads.shutdown)
        for worker in crew.workers:
            worker.stop()

    def _current(self) -> _Crew:
        if self._crew.owner != os.getpid():  # in a fork, threads and workers belong to the parent
            self._crew = _Crew(self._command, self._size)
            if self._closed:
                self._crew.threads.shutdown()
        return self._crew


class _Crew:
    """The workers of one process, and the threads that wait for them."""

    def __init__(self, command: list[str], size: int) -> None:
        self.owner = os.getpid()
        self.workers = [_Worker(command) for _ in range(size)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in reversed(self.workers):
            self._idle.put(worker)
        # A worker dies with the thread that started it, so threads live until the pool is closed.
        self.threads = ThreadPoolExecutor(max_workers=size, thread_name_prefix=command[3])

    def ask(self, line: bytes, timeout_s: float) -> dict[str, Any]:
        worker = self._idle.get()
        try:
            return worker.ask(line, timeout_s)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process, used by one thread at a time."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._closed = False
        self._served = 0
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, line: bytes, timeout_s: float) -> dict[str, Any]:
        process = self._started()
        try:
            _send(process, line + b"\n")
            reply: dict[str, Any] = json.loads(self._line(process, timeout_s))
        except BrokenPipeError:
            error = _cause_of_death(process)
            self.stop()
            raise error from None
        except BaseException:
            self.stop()
            raise
        self._served += 1
        if self._served >= _REQUESTS_PER_WORKER:
            self.stop()
        return reply

    def kill(self) -> None:
        """Kill the process for good. Safe from any thread."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()

    def stop(self) -> None:
        """End the process and forget it."""
        process, self._process, self._served = self._process, None, 0
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.stop()  # it died while idle
        if self._process is None:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    bufsize=0,  # a fork must not inherit a partial request and send it when it ends
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                if self._closed:
                    self._process.kill()
                self._line(self._process, _START_S)
            except (OSError, WorkerCrashError, WorkerKilledError, WorkerTimeoutError) as error:
                self.stop()
                raise RewardError(f"worker {self._command[3]} does not start: {error}") from None
        return self._process

    def _line(self, process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
        assert process.stdout is not None
        fd = process.stdout.fileno()
        end = time.monotonic() + timeout_s
        data = b""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while not data.endswith(b"\n"):
            left = end - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise WorkerTimeoutError(f"not finished within {timeout_s:g} s")
            chunk = os.read(fd, 65536)
            data += chunk
            if not chunk:
                raise _cause_of_death(process)
        return data


def _cause_of_death(process: subprocess.Popen[bytes]) -> RewardError:
    """Return the error for a worker that has closed its pipe."""
    try:
        status = process.wait(_LAST_BREATH_S)
    except subprocess.TimeoutExpired:
        return WorkerCrashError("the worker closed its pipe")
    if status == -signal.SIGPROF:
        return WorkerCpuError("the worker used up its CPU time")
    if status in (-signal.SIGKILL, -signal.SIGTERM):
        return WorkerKilledError(f"the worker was ended from outside by signal {-status}")
    return WorkerCrashError(f"the worker died with status {status}")


def _send(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    left = memoryview(data)
    while left:
        left = left[process.stdin.write(left) :]
