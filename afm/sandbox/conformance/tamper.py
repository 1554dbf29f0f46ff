"""Attacks on other runs, on what runs the program, and on secrets of either."""

from __future__ import annotations

from afm.sandbox.base import ExitReason
from afm.sandbox.conformance.attack import Attack

_MARKS = "('/tmp/mark', '/dev/shm/mark', '/dev/mark', '/mark', '/etc/mark', '/usr/mark', '/usr/lib/mark')"

ATTACKS = (
    Attack(
        "leave files for the next run",
        f"verdict(*(os.path.exists(path) for path in {_MARKS}), os.listdir('/tmp') != ['main.py'], bool(os.listdir('/dev/shm')))",
        before=f"for path in {_MARKS}:\n    attempt(lambda: open(path, 'w').write('M'))",
    ),
    Attack(
        "change modules of the next run",
        """
import json, math
verdict(math.pi != __import__("ctypes").c_double(3.141592653589793).value, json.loads("1") != 1, len([1, 2]) != 2,
    "evil" in sys.modules, "/evil" in sys.path, "EVIL" in os.environ, sys.getrecursionlimit() != 1000)""",
        before="""
import builtins, json, math
math.pi = 3; json.loads = lambda text: 7; builtins.len = lambda x: 0; sys.modules["evil"] = math
sys.path.insert(0, "/evil"); os.environ["EVIL"] = "1"; sys.setrecursionlimit(5000)""",
    ),
    Attack(
        "change the code of the next run's functions in place",
        """
import json, random, textwrap
verdict(json.dumps([1]) != "[1]", textwrap.dedent(" a") != "a", random.randint(1, 1) != 1)""",
        before="""
import json, random, textwrap
for function in (json.dumps, textwrap.dedent, random.Random.randint):
    function.__code__ = (lambda *a, **k: "owned").__code__""",
    ),
    Attack(
        "overwrite small integers of the next run",
        "verdict(2 + 2 != 4, sum([1, 1]) != 2)",
        before="ctypes.memmove(id(4) + 24, ctypes.byref(ctypes.c_uint32(5)), 4)",
    ),
    Attack(
        "leave signal handlers, limits and timers to the next run",
        """
import resource, signal
time.sleep(0.3)
verdict(signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, signal.getitimer(signal.ITIMER_REAL)[0] > 0,
    resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 32, os.umask(0o22) == 0)""",
        before="""
import resource, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
signal.signal(signal.SIGALRM, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16)); os.umask(0)""",
    ),
    Attack(
        "leave a process for the next run",
        """
seen = []
for pid in range(3, 2000):
    try:
        os.kill(pid, 0); seen.append(pid)
    except OSError:
        pass
verdict(bool(set(seen) - {os.getpid()}), seen)""",
        before="if os.fork() == 0:\n    os.setsid(); time.sleep(20)",
    ),
    Attack(
        "read the program and the input of the run before",
        """
import gc
unfreeze = getattr(gc, "unfreeze", None); unfreeze and unfreeze()
def secret(thing): return "answer-" + str(7141 + 1) in str(thing)[:9999]
found = [type(o) for o in gc.get_objects() if isinstance(o, (list, dict, tuple)) and len(o) < 99 and secret(o)]
frame = sys._getframe()
while frame.f_back:
    frame = frame.f_back
    found += [name for name, value in frame.f_locals.items() if secret(value)]
verdict(bool(found), found)""",
        before="kept = 'answer-7142'; print(kept)",
    ),
    Attack(
        "read the host's checker through frames and modules",
        """
frame, files = sys._getframe(), set()
while frame:
    files.add(frame.f_code.co_filename); frame = frame.f_back
files |= {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
ours = [name for name in files if "afm" in name or "zygote" in name]
names = [name for name in sys.modules if name.split(".")[0] in ("afm", "pytest", "verl", "kernel", "program")]
verdict(bool(names), any(map(os.path.exists, ours)), "afm" in str(sys.path), names)""",
    ),
    Attack(
        "import the framework that runs it",
        """
def found(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True
verdict(found("afm"), found("afm.sandbox.inside.kernel"), found("kernel"), found("serve"))""",
    ),
    Attack(
        "use the zygote's socket",
        """
import gc
unfreeze = getattr(gc, "unfreeze", None); unfreeze and unfreeze()
used = []
for thing in gc.get_objects():
    if isinstance(thing, socket.socket) and thing.fileno() >= 0:
        used.append(attempt(lambda: thing.send(b"{}") and None))
for fd in range(3, 256):
    used.append(attempt(lambda: os.write(fd, b"{}") and None))
verdict(*used)""",
    ),
    Attack(
        "kill or stop the zygote",
        """
for pid in (os.getppid(), 0 - os.getppid(), 1, -1, 2, 3):
    for number in (19, 2, 15, 9):
        try:
            if pid not in (os.getpid(), 0) and not (pid == -1 and number == 9):
                os.kill(pid, number)
        except OSError:
            pass
print("OK:")""",
        reasons=(ExitReason.OK, ExitReason.ERROR, ExitReason.KILLED, ExitReason.TIMEOUT),
    ),
    Attack(
        "exhaust what the next run needs before it is stopped",
        "print('OK:', os.listdir('/tmp'), os.getpid() < 50)",
        before="""
for n in range(40):
    try:
        open(f"/tmp/f{n}", "wb").write(b"x" * (1 << 20)); open(f"/dev/shm/f{n}", "wb").write(b"x" * (1 << 20))
    except OSError:
        break
while True:
    try:
        os.fork()
    except OSError:
        os.kill(-1, 9)""",
    ),
    Attack(
        "rewrite its own program file",
        """
open("/tmp/main2.py", "w").write("print('BAD')")
os.replace("/tmp/main2.py", "/tmp/main.py")
verdict("".join(reversed("DAB")) in "")""",
        before="import os; os.chmod('/tmp/main.py', 0o777); open('/tmp/main.py', 'w').write('print(0)')",
    ),
    Attack(
        "change /dev/stdin for the next run",
        "verdict(os.path.exists('/dev/stdin') and open('/dev/stdin').read() != '', sys.stdin.read() != '')",
        before="attempt(lambda: os.chmod('/dev/stdin', 0o777)); attempt(lambda: open('/dev/stdin', 'w').write('owned'))",
    ),
    Attack(
        "tamper with its standard input's file",
        """
import fcntl
verdict(attempt(lambda: os.write(0, b"x") and None), attempt(lambda: os.ftruncate(0, 100)))""",
    ),
)
