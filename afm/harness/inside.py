"""Run a harness's program inside the jail, and forward a loopback port of the jail to the gateway's Unix socket.

The host passes this file to the sandbox as the code of a run (:mod:`afm.harness.jail`), with a JSON order on standard
input. It imports only the standard library, and prints the result of the program as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from typing import IO

CHUNK = 1 << 16


def pump(source: socket.socket, target: socket.socket) -> None:
    """Copy data until either side ends."""
    try:
        while True:
            data = source.recv(CHUNK)
            if not data:
                break
            target.sendall(data)
    except OSError:
        pass
    for end, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            end.shutdown(how)


def forward(listener: socket.socket, path: str) -> None:
    """Connect each client to the gateway."""
    while True:
        client = listener.accept()[0]
        gateway = socket.socket(socket.AF_UNIX)
        gateway.connect(path)
        for pair in ((client, gateway), (gateway, client)):
            threading.Thread(target=pump, args=pair, daemon=True).start()


class Output:
    """Reader of a pipe. It keeps the first ``limit`` bytes and kills a program that writes more."""

    def __init__(self, pipe: IO[bytes], limit: int, process: subprocess.Popen[bytes]) -> None:
        self.data, self.cut = bytearray(), False
        self._pipe, self._limit, self._process = pipe, limit, process
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while True:
            chunk = os.read(self._pipe.fileno(), CHUNK)
            if not chunk:
                return
            room = self._limit - len(self.data)
            self.data += chunk[:room]
            if len(chunk) > room and not self.cut:
                self.cut = True
                self._process.kill()

    def text(self) -> str:
        """Return the text so far. Output that a forked process still writes is not awaited."""
        self._thread.join(1.0)
        return self.data.decode("utf-8", "replace")


def feed(pipe: IO[bytes], data: bytes) -> None:
    """Write the task. The program may ignore it."""
    try:
        pipe.write(data)
        pipe.close()
    except OSError:
        pass


def main() -> None:
    """Start the program, wait for it, and print its result."""
    order = json.load(sys.stdin)
    listener = socket.create_server(("127.0.0.1", order["port"]))
    threading.Thread(target=forward, args=(listener, order["socket"]), daemon=True).start()
    os.mkdir("/tmp/work")  # noqa: PTH102
    with open(order["task_file"], "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(order["task"])
    first, *rest = order["words"]
    words = [sys.executable if first in ("python", "python3") else first, *rest]
    imports = os.pathsep.join(entry for entry in sys.path if entry and entry != "/tmp")
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/tmp/work",
        env={**os.environ, "PYTHONPATH": imports, **order["env"]},
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    outputs = [Output(pipe, order["limit"], process) for pipe in (process.stdout, process.stderr)]
    threading.Thread(target=feed, args=(process.stdin, order["task"].encode()), daemon=True).start()
    status = process.wait()
    verdict, readable = None, not os.path.lexists(order["verdict_file"])
    if os.path.isfile(order["verdict_file"]):  # noqa: PTH113
        with (
            contextlib.suppress(OSError),
            open(order["verdict_file"], encoding="utf-8", errors="replace") as file,  # noqa: PTH123
        ):
            verdict, readable = file.read(order["limit"]), True
    stdout, stderr = (output.text() for output in outputs)
    cut = any(output.cut for output in outputs)
    json.dump(
        {
            "status": status,
            "stdout": stdout,
            "stderr": stderr,
            "cut": cut,
            "verdict": verdict,
            "readable": readable,
        },
        sys.stdout,
    )
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
