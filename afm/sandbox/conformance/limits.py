"""Attacks on the limits of a run (memory, processes, files, output, CPU time), and on its end."""

from __future__ import annotations

from afm.sandbox.conformance.attack import LIMITS, SURVIVOR, attacks

_FORKING = LIMITS.model_copy(update={"wall_s": 0.8})
_COMPUTING = LIMITS.model_copy(update={"wall_s": 60.0, "cpu_s": 1})
_SHORT = LIMITS.model_copy(update={"wall_s": 0.8})
_NO_INODE_LIMIT = {"bubblewrap": "bubblewrap mounts /tmp without a limit on files; CPU time bounds them"}

RESOURCES = (
    *attacks(
        """
### hoard memory in anonymous files, which no limit counts
verdict(attempt(lambda: os.close(os.memfd_create("hoard"))))
### pin huge pages in pipes, each for 4 KiB of the pipe
import mmap
libc.mmap.restype, huge = ctypes.c_void_p, 2 << 20
libc.prctl(41, 0, 0, 0, 0); libc.prctl(41, 1, 2, 0, 0)  # back to huge pages, at least where they are asked for
reading, writing = os.pipe()
area = mmap.mmap(-1, 8 * huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
area.madvise(14)
start = ctypes.addressof(ctypes.c_char.from_buffer(area))
start += -start % huge
ctypes.memset(start, 1, huge)
vector = (ctypes.c_void_p * 2)(start, 4096)
verdict(libc.prctl(42, 0, 0, 0, 0) != 1, call(VMSPLICE, writing, vector, ctypes.c_long(1), 0),
    call(MADVISE, ctypes.c_void_p(start), ctypes.c_long(huge), 25))
### raise its limits
import resource
names = ("AS", "CPU", "FSIZE", "NOFILE", "NPROC", "CORE")
def raised(name):
    number = getattr(resource, "RLIMIT_" + name)
    soft, hard = resource.getrlimit(number)
    try:
        resource.setrlimit(number, (hard + 1, hard + 1))
    except (ValueError, OSError):
        return hard == resource.RLIM_INFINITY
    return True
verdict(*map(raised, names))
### fork without end
count = 0
try:
    while count < 300:
        if os.fork() == 0:
            time.sleep(5); os._exit(0)
        count += 1
except OSError as error:
    pass
verdict(count >= 40, count)
### start threads without end
import threading
count = 0
try:
    while count < 300:
        threading.Thread(target=time.sleep, args=(2,), daemon=True).start(); count += 1
except RuntimeError:
    pass
verdict(count >= 40, count)
sys.stdout.flush(); os._exit(0)
### take much memory
blocks = []
try:
    while len(blocks) < 8:
        blocks.append(b"x" * (100 << 20))
except MemoryError:
    pass
size = len(blocks); blocks.clear()
verdict(size >= 6, size)
### open 10,000 files
files = []
try:
    while len(files) < 10000:
        files.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
verdict(len(files) > 100, len(files))
### write a large file
import signal
def fill():
    with open("large", "wb") as file:
        for _ in range(100):
            file.write(b"x" * (1 << 20)); file.flush()
verdict(attempt(fill), os.path.getsize("large") > 9 << 20)
### fill /tmp and /dev/shm
def filled(folder):
    total = 0
    try:
        for number in range(40):
            with open(f"{folder}/f{number}", "wb") as file:
                file.write(b"x" * (1 << 20)); total += 1
    except OSError:
        pass
    return total
totals = filled("/tmp"), filled("/dev/shm")
verdict(max(totals) > 8, totals)
### leave a core dump, or start the host's crash handler
import resource
child = os.fork()
if child == 0:
    ctypes.string_at(0)
_, status = os.waitpid(child, 0)
helper = resource.getrlimit(resource.RLIMIT_CORE) != (1, 1)  # whether the kernel would start the host's crash handler
verdict(os.WCOREDUMP(status), os.listdir("/tmp") != ["main.py"], helper)
### take shared memory
import mmap
blocks = []
try:
    while len(blocks) < 8:
        block = mmap.mmap(-1, 100 << 20)
        for page in range(0, 100 << 20, 4096):
            block[page] = 1
        blocks.append(block)
except (OSError, MemoryError):
    pass
verdict(len(blocks) >= 6, len(blocks))
### unpack a bomb
import zlib
try:
    packer = zlib.compressobj(1, zlib.DEFLATED, -15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    size = len(zlib.decompressobj(-15).decompress(block * 2000))
except MemoryError:
    size = 0
verdict(size > 600 << 20, size)
### make a file of a terabyte with holes
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
verdict(attempt(lambda: os.truncate("/tmp/main.py", 1 << 40)), attempt(lambda: os.ftruncate(os.open("big", os.O_CREAT | os.O_RDWR), 1 << 40)))
### print without a newline for ever => output
import os
while True: os.write(1, b'y' * 65536)
### print to stderr for ever from several processes => output
for _ in range(5):
    os.fork()
while True:
    os.write(2, b"y" * 65536)
### print one huge text => output memory
print('y' * (200 << 20))
### overflow the stack => error memory cpu timeout
import sys
sys.setrecursionlimit(10 ** 9)
def deeper(*a): return deeper(*a)
class Deep:
    def __repr__(self): return repr(self)
try:
    repr(Deep())
finally:
    deeper()
""",
    ),
    *attacks(
        """
### fork until it is stopped => cpu timeout
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        limits=_FORKING,
    ),
    *attacks(
        """
### take memory in several processes
held = []
gate, opener = os.pipe()
for _ in range(3):
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(opener)
        try:
            block = bytearray(240 << 20); os.write(writing, b"held"); os.read(gate, 1); os._exit(0)
        except MemoryError:
            os._exit(1)
    os.close(writing); held.append(reading)
for reading in held: os.read(reading, 4)  # each holds its memory or is dead
os.close(opener)
ends = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in held]
verdict(not any(ends), ends)
""",
        needs_memory_group=True,
    ),
    *attacks(
        """
### make tens of thousands of files
count = 0
try:
    while count < 30000:
        os.close(os.open("f%d" % count, os.O_CREAT)); count += 1
except OSError:
    pass
verdict(count > 10000, count)
### nest folders without end
depth = 0
try:
    while depth < 30000:
        os.mkdir("d"); os.chdir("d"); depth += 1
except OSError:
    pass
verdict(depth > 10000, depth)
""",
        not_by=_NO_INODE_LIMIT,
    ),
    *attacks(
        r"""
### print what is not text => ok
import os
os.write(1, b'a\xff\xfe\xc3(b')
""",
        printed="a\ufffd\ufffd\ufffd(b",
    ),
    *attacks(
        r"""
### steer the terminal of whoever reads its output => ok
print('\x1b]0;owned\x07\x1b[2J\x00')
""",
        printed="\x1b]0;owned\x07\x1b[2J\x00\n",
    ),
)

COMPUTING = (
    *attacks(
        """
### compute for ever where Python does not look at signals => cpu memory timeout
x = 10 ** (10 ** 9)
### ignore the CPU limit's signal => cpu
import signal
for number in set(range(1, 65)) - {9, 19, 32, 33}:
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True: pass
### compute in one process after the other, each within its limit => cpu
for _ in range(12):
    child = os.fork()
    if child == 0:
        while time.process_time() < 0.6: pass
        os._exit(0)
    os.waitpid(child, 0)
print("BAD: 7 s of computing")
""",
        limits=_COMPUTING,
    ),
    *attacks(
        """
### burn the time of many cores => timeout cpu
for _ in range(5):
    os.fork()
while True: pass
""",
        limits=_FORKING,
    ),
    *attacks(
        """
### compute in processes that nobody waits for => cpu
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(7):
    child = os.fork()
    if child == 0:
        while time.process_time() < 0.6: pass
        os._exit(0)
    try:
        os.waitpid(child, 0)  # until it is gone; its time is nobody's
    except ChildProcessError:
        pass
print("BAD: 4 s of computing")
""",
        limits=_COMPUTING,
        needs_cpu_group=True,
    ),
)

ENDING = (
    *attacks(
        """
### leave a daemon behind
daemon(0, 1, 2); print('OK: parent done')
### leave a daemon that holds its output open
daemon(); print('OK: parent done')
### leave a daemon that adopts the others
libc.prctl(36, 1, 0, 0, 0); daemon(0, 1, 2); daemon(0, 1, 2); print('OK: parent done')
""",
        survivor=SURVIVOR,
    ),
    *attacks(
        """
### leave a daemon when it is stopped => timeout
daemon(); time.sleep(60)
""",
        limits=_SHORT,
        survivor=SURVIVOR,
    ),
    *attacks(
        """
### stop itself => timeout
import os, signal; os.kill(os.getpid(), signal.SIGSTOP)
### stop everything it can reach => timeout
import signal
for stop in (lambda: os.kill(-1, signal.SIGSTOP), lambda: os.kill(1, signal.SIGSTOP), lambda: os.kill(0, signal.SIGSTOP)):
    attempt(stop)
### wait for ever in atexit => timeout
import atexit, time; atexit.register(time.sleep, 60)
### wait for ever in a destructor => timeout
import time
class Slow:
    def __del__(self, sleep=time.sleep): sleep(60)
slow = Slow()
### wait for ever in a thread => timeout
import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()
""",
        limits=_SHORT,
    ),
    *attacks(
        """
### raise in a destructor => ok 0
class Bad:
    def __del__(self): raise SystemExit(3)
bad = Bad(); cycle = Bad(); cycle.me = cycle
print('end')
### raise in atexit => ok 0
import atexit
@atexit.register
def fail(): raise ValueError
print('end')
### end the process from a thread => ok 0
import sys, threading
t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join(); print('end')
""",
        printed="end\n",
    ),
    *attacks(
        r"""
### kill the process from a thread => error 9
import os, threading, time
threading.Thread(target=os._exit, args=(9,)).start(); time.sleep(5)
### abort => error -6
import os; os.abort()
### die by its own hand => killed -9
import os; os.kill(os.getpid(), 9)
### pretend that its memory was not enough => error 1
import sys; print('MemoryError', file=sys.stderr); sys.exit(1)
### pretend that its memory was not enough by an exception of its own => error 1
raise MemoryError
### pretend that the memory of a child was its own => error 1
import os
if os.fork() == 0:
    b'x' * (1 << 40)
os.wait(); raise SystemExit(1)
### pretend to have computed too long => error -24
import os, signal; os.kill(os.getpid(), signal.SIGXCPU)
### close all its descriptors => error 4
import os; os.closerange(0, 1024); raise SystemExit(4)
### leave children that nobody reaps
import os
for _ in range(20):
    if os.fork() == 0: os._exit(1)
print('OK:')
### pretend to have ended well => error 7
import os
for fd in range(1, 64):
    try: os.write(fd, b'ready\n0 0 0.0\n')
    except OSError: pass
os._exit(7)
### hide a failure by overwriting what ends Python => error 5
import atexit, builtins, os, sys
atexit.register(print, "end")
sys.exit = os._exit = builtins.exit = sys.excepthook = lambda *a: print("swallowed")
def broken(*a, **k): raise RuntimeError
builtins.open = builtins.compile = builtins.exec = builtins.BaseException = broken
raise SystemExit(5)
### wipe the interpreter => ok error
import builtins, sys; sys.modules.clear(); builtins.__dict__.clear()
""",
    ),
)
