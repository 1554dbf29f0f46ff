"""The worker process of the math reward: ``python -m afm.rewards.verifier MEMORY_BYTES CPU_S``.

Reads ``{"gold", "answer"}`` lines, writes ``{"equal"}`` lines, or ``{"error"}`` with the type of exception that
Math-Verify raised. A pair that uses up CPU_S ends the process.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import sys

from afm.rewards.algebra import algebra_verdict, is_unfinished
from afm.rewards.workers import limit_cpu

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve until standard input ends."""
    reply_to = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # nothing a library prints may look like a reply
    _confine(int(sys.argv[1]))
    import math_verify  # noqa: F401 - the first pair should not pay for it

    reply_to.write(b'{"ready": true}\n')
    for line in sys.stdin.buffer:
        limit_cpu(float(sys.argv[2]))
        reply = json.dumps(_reply(json.loads(line))).encode()
        limit_cpu(0)
        reply_to.write(reply + b"\n")


def _confine(memory_bytes: int) -> None:
    """Bound the memory, end with the parent, and leave Ctrl-C to it."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)


def _reply(request: dict[str, str]) -> dict[str, object]:
    try:
        if is_unfinished(request["gold"], request["answer"]):
            return {"equal": False, "error": "an expression that was not worked out"}
        return {"equal": algebra_verdict(request["gold"], request["answer"])}
    except MemoryError:
        sys.exit("out of memory")  # the caller tries once more in a worker without full caches
    except Exception as error:  # noqa: BLE001 - whatever hostile LaTeX does to the verifier
        return {"error": type(error).__name__}


if __name__ == "__main__":
    main()
