"""Attacks on the end of a run: programs that will not end, or pretend to have ended well."""

from __future__ import annotations

from dataclasses import replace

from afm.sandbox.base import ExitReason
from afm.sandbox.conformance.attack import LIMITS, Attack

_SHORT = replace(LIMITS, wall_s=0.8)
_DAEMON = """
def daemon(*closed):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in closed:
                os.close(fd)
            os.execv(sys.executable, ["afm-survivor", "-c", "import time; time.sleep(60)"])
        os._exit(0)
    time.sleep(0.3)
"""

ENDING = (
    Attack(
        "leave a daemon behind",
        f"{_DAEMON}\ndaemon(0, 1, 2); print('OK: parent done')",
        survivor="afm-survivor",
    ),
    Attack(
        "leave a daemon that holds its output open",
        f"{_DAEMON}\ndaemon(); print('OK: parent done')",
        survivor="afm-survivor",
    ),
    Attack(
        "leave a daemon that adopts the others",
        f"{_DAEMON}\nlibc.prctl(36, 1, 0, 0, 0); daemon(0, 1, 2); daemon(0, 1, 2); print('OK: parent done')",
        survivor="afm-survivor",
    ),
    Attack(
        "leave a daemon when it is stopped",
        f"{_DAEMON}\ndaemon(); time.sleep(60)",
        reasons=(ExitReason.TIMEOUT,),
        survivor="afm-survivor",
        limits=_SHORT,
    ),
    Attack(
        "stop itself",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        reasons=(ExitReason.TIMEOUT,),
        limits=_SHORT,
    ),
    Attack(
        "stop everything it can reach",
        """
import signal
for stop in (lambda: os.kill(-1, signal.SIGSTOP), lambda: os.kill(1, signal.SIGSTOP), lambda: os.kill(0, signal.SIGSTOP)):
    attempt(stop)""",
        reasons=(ExitReason.TIMEOUT,),
        limits=_SHORT,
    ),
    Attack(
        "wait for ever in atexit",
        "import atexit, time; atexit.register(time.sleep, 60)",
        reasons=(ExitReason.TIMEOUT,),
        limits=_SHORT,
    ),
    Attack(
        "wait for ever in a destructor",
        "import time\nclass Slow:\n    def __del__(self, sleep=time.sleep): sleep(60)\nslow = Slow()",
        reasons=(ExitReason.TIMEOUT,),
        limits=_SHORT,
    ),
    Attack(
        "wait for ever in a thread",
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
        reasons=(ExitReason.TIMEOUT,),
        limits=_SHORT,
    ),
    Attack(
        "raise in a destructor",
        "class Bad:\n    def __del__(self): raise SystemExit(3)\nbad = Bad(); cycle = Bad(); cycle.me = cycle\nprint('end')",
        reasons=(ExitReason.OK,),
        status=0,
        printed="end\n",
    ),
    Attack(
        "raise in atexit",
        "import atexit\n@atexit.register\ndef fail(): raise ValueError\nprint('end')",
        reasons=(ExitReason.OK,),
        status=0,
        printed="end\n",
    ),
    Attack(
        "end the process from a thread",
        "import sys, threading\nt = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join(); print('end')",
        reasons=(ExitReason.OK,),
        status=0,
        printed="end\n",
    ),
    Attack(
        "kill the process from a thread",
        "import os, threading, time\nthreading.Thread(target=os._exit, args=(9,)).start(); time.sleep(5)",
        reasons=(ExitReason.ERROR,),
        status=9,
    ),
    Attack("abort", "import os; os.abort()", reasons=(ExitReason.ERROR,), status=-6),
    Attack(
        "die by its own hand",
        "import os; os.kill(os.getpid(), 9)",
        reasons=(ExitReason.KILLED,),
        status=-9,
    ),
    Attack(
        "pretend that its memory was not enough",
        "import sys; print('MemoryError', file=sys.stderr); sys.exit(1)",
        reasons=(ExitReason.ERROR,),
        status=1,
    ),
    Attack(
        "pretend that its memory was not enough by an exception of its own",
        "raise MemoryError",
        reasons=(ExitReason.ERROR,),
        status=1,
    ),
    Attack(
        "pretend that the memory of a child was its own",
        "import os\nif os.fork() == 0:\n    b'x' * (1 << 40)\nos.wait(); raise SystemExit(1)",
        reasons=(ExitReason.ERROR,),
        status=1,
    ),
    Attack(
        "pretend to have computed too long",
        "import os, signal; os.kill(os.getpid(), signal.SIGXCPU)",
        reasons=(ExitReason.ERROR,),
        status=-24,
    ),
    Attack(
        "close all its descriptors",
        "import os; os.closerange(0, 1024); raise SystemExit(4)",
        reasons=(ExitReason.ERROR,),
        status=4,
    ),
    Attack(
        "leave children that nobody reaps",
        "import os\nfor _ in range(20):\n    if os.fork() == 0: os._exit(1)\nprint('OK:')",
    ),
    Attack(
        "pretend to have ended well",
        "import os\nfor fd in range(1, 64):\n    try: os.write(fd, b'ready\\n0 0 0.0\\n')\n    except OSError: pass\nos._exit(7)",
        reasons=(ExitReason.ERROR,),
        status=7,
    ),
    Attack(
        "hide a failure by overwriting what ends Python",
        """
import atexit, builtins, os, sys
atexit.register(print, "end")
sys.exit = os._exit = builtins.exit = sys.excepthook = lambda *a: print("swallowed")
def broken(*a, **k): raise RuntimeError
builtins.open = builtins.compile = builtins.exec = builtins.BaseException = broken
raise SystemExit(5)""",
        reasons=(ExitReason.ERROR,),
        status=5,
    ),
    Attack(
        "wipe the interpreter",
        "import builtins, sys; sys.modules.clear(); builtins.__dict__.clear()",
        reasons=(ExitReason.OK, ExitReason.ERROR),
    ),
)
