"""Attacks on the limits of a run: memory, processes, files, output, CPU time."""

from __future__ import annotations

from dataclasses import replace

from afm.sandbox.base import ExitReason
from afm.sandbox.conformance.attack import LIMITS, Attack

_NO_INODE_LIMIT = {"bubblewrap": "bubblewrap mounts /tmp without a limit on files; CPU time bounds them"}

RESOURCES = (
    Attack(
        "hoard memory in anonymous files, which no limit counts",
        """
verdict(attempt(lambda: os.close(os.memfd_create("hoard"))))""",
    ),
    Attack(
        "pin huge pages in pipes, each for 4 KiB of the pipe",
        """
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
    call(MADVISE, ctypes.c_void_p(start), ctypes.c_long(huge), 25))""",
    ),
    Attack(
        "raise its limits",
        """
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
verdict(*map(raised, names))""",
    ),
    Attack(
        "fork without end",
        """
count = 0
try:
    while count < 300:
        if os.fork() == 0:
            time.sleep(5); os._exit(0)
        count += 1
except OSError as error:
    pass
verdict(count >= 40, count)""",
    ),
    Attack(
        "start threads without end",
        """
import threading
count = 0
try:
    while count < 300:
        threading.Thread(target=time.sleep, args=(2,), daemon=True).start(); count += 1
except RuntimeError:
    pass
verdict(count >= 40, count)
sys.stdout.flush(); os._exit(0)""",
    ),
    Attack(
        "take much memory",
        """
blocks = []
try:
    while len(blocks) < 30:
        blocks.append(b"x" * (100 << 20))
except MemoryError:
    pass
size = len(blocks); blocks.clear()
verdict(size >= 6, size)""",
    ),
    Attack(
        "open 10,000 files",
        """
files = []
try:
    while len(files) < 10000:
        files.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
verdict(len(files) > 100, len(files))""",
    ),
    Attack(
        "write a large file",
        """
import signal
def fill():
    with open("large", "wb") as file:
        for _ in range(100):
            file.write(b"x" * (1 << 20)); file.flush()
verdict(attempt(fill), os.path.getsize("large") > 9 << 20)""",
    ),
    Attack(
        "fill /tmp",
        """
total = 0
try:
    for number in range(40):
        with open(f"f{number}", "wb") as file:
            file.write(b"x" * (1 << 20)); total += 1
except OSError:
    pass
verdict(total > 8, total)""",
    ),
    Attack(
        "fill /dev/shm",
        """
total = 0
try:
    for number in range(40):
        with open(f"/dev/shm/f{number}", "wb") as file:
            file.write(b"x" * (1 << 20)); total += 1
except OSError:
    pass
verdict(total > 8, total)""",
    ),
    Attack(
        "leave a core dump, or start the host's crash handler",
        """
import resource
child = os.fork()
if child == 0:
    ctypes.string_at(0)
_, status = os.waitpid(child, 0)
helper = resource.getrlimit(resource.RLIMIT_CORE) != (1, 1)  # whether the kernel would start the host's crash handler
verdict(os.WCOREDUMP(status), os.listdir("/tmp") != ["main.py"], helper)""",
    ),
    Attack(
        "fork until it is stopped",
        """
while True:
    try:
        os.fork()
    except OSError:
        pass""",
        reasons=(ExitReason.CPU, ExitReason.TIMEOUT),
        limits=replace(LIMITS, wall_s=1.5),
    ),
    Attack(
        "take memory in several processes",
        """
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        try:
            block = bytearray(300 << 20); time.sleep(1); os._exit(0)
        except MemoryError:
            os._exit(1)
    children.append(child)
ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
verdict(not any(ends), ends)""",
        needs_memory_group=True,
    ),
    Attack(
        "take shared memory",
        """
import mmap
blocks = []
try:
    while len(blocks) < 30:
        block = mmap.mmap(-1, 100 << 20)
        for page in range(0, 100 << 20, 4096):
            block[page] = 1
        blocks.append(block)
except (OSError, MemoryError):
    pass
verdict(len(blocks) >= 6, len(blocks))""",
    ),
    Attack(
        "unpack a bomb",
        """
import zlib
try:
    packer = zlib.compressobj(1, zlib.DEFLATED, -15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    size = len(zlib.decompressobj(-15).decompress(block * 2000))
except MemoryError:
    size = 0
verdict(size > 600 << 20, size)""",
    ),
    Attack(
        "make a million files",
        """
count = 0
try:
    while count < 300000:
        os.close(os.open("f%d" % count, os.O_CREAT)); count += 1
except OSError:
    pass
verdict(count > 10000, count)""",
        not_by=_NO_INODE_LIMIT,
    ),
    Attack(
        "nest folders without end",
        """
depth = 0
try:
    while depth < 300000:
        os.mkdir("d"); os.chdir("d"); depth += 1
except OSError:
    pass
verdict(depth > 10000, depth)""",
        not_by=_NO_INODE_LIMIT,
    ),
    Attack(
        "make a file of a terabyte with holes",
        """
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
verdict(attempt(lambda: os.truncate("/tmp/main.py", 1 << 40)), attempt(lambda: os.ftruncate(os.open("big", os.O_CREAT | os.O_RDWR), 1 << 40)))""",
    ),
    Attack(
        "print without a newline for ever",
        "import os\nwhile True: os.write(1, b'y' * 65536)",
        reasons=(ExitReason.OUTPUT,),
    ),
    Attack(
        "print to stderr for ever from several processes",
        """
for _ in range(5):
    os.fork()
while True:
    os.write(2, b"y" * 65536)""",
        reasons=(ExitReason.OUTPUT,),
    ),
    Attack(
        "print one huge text",
        "print('y' * (200 << 20))",
        reasons=(ExitReason.OUTPUT, ExitReason.MEMORY),
    ),
    Attack(
        "print what is not text",
        "import os\nos.write(1, b'a\\xff\\xfe\\xc3(b')",
        reasons=(ExitReason.OK,),
        printed="a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}(b",
    ),
    Attack(
        "steer the terminal of whoever reads its output",
        "print('\\x1b]0;owned\\x07\\x1b[2J\\x00')",
        reasons=(ExitReason.OK,),
        printed="\x1b]0;owned\x07\x1b[2J\x00\n",  # data for the reader, who must not send it to a terminal
    ),
    Attack(
        "overflow the stack",
        """
import sys
sys.setrecursionlimit(10 ** 9)
def deeper(*a): return deeper(*a)
class Deep:
    def __repr__(self): return repr(self)
try:
    repr(Deep())
finally:
    deeper()""",
        reasons=(ExitReason.ERROR, ExitReason.MEMORY, ExitReason.CPU, ExitReason.TIMEOUT),
    ),
)

COMPUTING = (
    Attack(
        "compute for ever where Python does not look at signals",
        "x = 10 ** (10 ** 9)",
        reasons=(ExitReason.CPU, ExitReason.MEMORY, ExitReason.TIMEOUT),
        limits=replace(LIMITS, cpu_s=1),
    ),
    Attack(
        "ignore the CPU limit's signal",
        """
import signal
for number in set(range(1, 65)) - {9, 19, 32, 33}:
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True: pass""",
        reasons=(ExitReason.CPU,),
        limits=replace(LIMITS, cpu_s=1, wall_s=30.0),
    ),
    Attack(
        "burn the time of many cores",
        """
for _ in range(5):
    os.fork()
while True: pass""",
        reasons=(ExitReason.TIMEOUT, ExitReason.CPU),
        limits=replace(LIMITS, wall_s=1.5),
    ),
    Attack(
        "compute in one process after the other, each within its limit",
        """
for _ in range(12):
    child = os.fork()
    if child == 0:
        while time.process_time() < 0.6: pass
        os._exit(0)
    os.waitpid(child, 0)
print("BAD: 7 s of computing")""",
        reasons=(ExitReason.CPU,),
        limits=replace(LIMITS, cpu_s=1, wall_s=60.0),
    ),
    Attack(
        "compute in processes that nobody waits for",
        """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(12):
    child = os.fork()
    if child == 0:
        while time.process_time() < 0.6: pass
        os._exit(0)
    try:
        os.waitpid(child, 0)  # until it is gone; its time is nobody's
    except ChildProcessError:
        pass
print("BAD: 7 s of computing")""",
        reasons=(ExitReason.CPU,),
        limits=replace(LIMITS, cpu_s=1, wall_s=60.0),
        needs_cpu_group=True,
    ),
)
