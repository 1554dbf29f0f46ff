"""Attacks on other runs, on the runner of the program, and on what all runs share: kernel tables, locks, devices."""

from __future__ import annotations

from afm.sandbox.conformance.attack import attacks

SHARED = (
    *attacks(
        r"""
### hoard kernel memory in attributes of files
import struct
open("held", "w").close()
file, value = os.open("held", os.O_RDWR), ctypes.create_string_buffer(60000)
verdict(attempt(lambda: os.setxattr("held", "user.a", value)), attempt(lambda: os.setxattr(file, "user.b", value)),
    attempt(lambda: os.setxattr("held", "user.c", value, follow_symlinks=False)),
    call(SETXATTRAT, -100, b"held", 0, b"user.d", struct.pack("QII", ctypes.addressof(value), 60000, 0), ctypes.c_size_t(16)))
### lock a file that other runs and the host use
import fcntl, json
shown = [open(os.__file__), open(json.__file__), open("/dev/null")]
verdict(*(attempt(lambda f=f, k=k: fcntl.flock(f, k | fcntl.LOCK_NB)) for f in shown for k in (fcntl.LOCK_EX, fcntl.LOCK_SH)))
### leave marks at files that all runs see
import fcntl, struct
verdict(*(attempt(lambda c=c, p=p: fcntl.fcntl(open(p, "rb"), c, struct.pack("Q", 2)) and None)
    for c in (1036, 1038) for p in (os.__file__, "/dev/null")))
### lease a file of the host or be notified of its changes
import fcntl
lease, folder = os.open(os.__file__, os.O_RDONLY), os.open(os.path.dirname(os.__file__), os.O_RDONLY)
own = os.open("own", os.O_CREAT | os.O_RDONLY)
verdict(*(attempt(lambda f=f: fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_RDLCK) and None) for f in (lease, own)),
    attempt(lambda: fcntl.fcntl(folder, fcntl.F_NOTIFY, 1) and None))
### take the machine's contexts for asynchronous input and output
context = ctypes.c_ulong(0)
verdict(call(IO_SETUP, 1000, ctypes.byref(context)))
### watch what the host and other runs do with files
verdict(*(call(number, 0) for number in (INOTIFY_INIT, INOTIFY_INIT1) if number))
### make the host write its disks out
import fcntl, mmap
shown = open(os.__file__, "rb")
extents = bytearray(32); extents[8:17] = b"\xff" * 8 + b"\x01"
wrong = ctypes.c_long(-1), ctypes.c_long(0), ctypes.c_long(0), ctypes.c_long(0)
verdict(*(reaches_kernel(number, *wrong) for number in (FSYNC, FDATASYNC, SYNCFS, SYNC_FILE_RANGE)),
    reaches_kernel(MSYNC, ctypes.c_long(1), ctypes.c_long(4096), 4), attempt(lambda: os.fsync(shown)) is not True and "BAD",
    *(attempt(lambda c=c: fcntl.ioctl(shown, c, extents) and None) for c in (0xC020660B, 0x9408, 0x80089418)))
### drop or read what the host keeps in its cache
wrong = ctypes.c_long(-1), ctypes.c_long(0), ctypes.c_long(0), ctypes.c_long(4)
byte = ctypes.create_string_buffer(64)
page = ctypes.addressof(byte) & ~4095
shown = os.open(os.__file__, os.O_RDONLY)
vector = (ctypes.c_void_p * 2)(ctypes.addressof(byte), 64)
verdict(*(call(PREADV2, shown, vector, ctypes.c_long(1), ctypes.c_long(0), ctypes.c_long(0), flag) for flag in (8, 128)),
    *(reaches_kernel(number, *wrong) for number in (FADVISE64, READAHEAD)),
    *(reaches_kernel(MADVISE, ctypes.c_long(1), ctypes.c_long(4096), advice) for advice in (20, 21)),
    call(MINCORE, ctypes.c_void_p(page), ctypes.c_long(4096), byte),
    call(CACHESTAT, shown, byte, ctypes.create_string_buffer(64), 0))
### share equal pages with other runs, which shows in the time that a write takes
import mmap
page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
verdict(call(MADVISE, ctypes.c_void_p(address), ctypes.c_long(4096), 12), libc.prctl(67, 1, 0, 0, 0) == 0)
### name a pair of sockets, or use it as a server
pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
stream = socket.socketpair()
verdict(attempt(lambda: pair[0].bind("\0meeting")), attempt(lambda: stream[0].bind("/tmp/meeting")),
    attempt(lambda: pair[1].connect("\0meeting")), attempt(lambda: stream[1].listen()))
### have the kernel name a socket, and write to a name
pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
attempt(lambda: pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1))
pair[0].send(b"x")
def write():
    try:
        pair[0].sendto(b"x", b"\0meeting")
    except ConnectionRefusedError:
        pass  # the kernel looked for it
verdict(bool(pair[0].getsockname()), pair[0].getsockname(), attempt(write))
### keep descriptors in flight between sockets, which are counted for its user
import array
pair = socket.socketpair()
sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 200))]
verdict(attempt(lambda: pair[0].sendmsg([b"x"], sent) and None), call(SENDMMSG, pair[0].fileno(), None, 0, 0))
""",
    ),
    *attacks(
        """
### speak to a concurrent run through locks on bytes
import fcntl, struct
def asked(file, command):
    lock = struct.unpack("hhqqi4x", fcntl.fcntl(file, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)))
    return None if lock[0] == fcntl.F_UNLCK else True
shown, null = open(os.__file__), open("/dev/null", "r+b", 0)
verdict(attempt(lambda: asked(shown, fcntl.F_GETLK)) == "BAD", asked(shown, fcntl.F_GETLK), asked(null, fcntl.F_GETLK),
    attempt(lambda: asked(shown, 36)), attempt(lambda: fcntl.fcntl(shown, 37, bytes(32)) and None),
    *(attempt(lambda d=d: fcntl.lockf(open(d, "r+b", 0), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 7))
        for d in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")))
""",
        neighbour="import fcntl, os, time\nheld = open(os.__file__); fcntl.lockf(held, fcntl.LOCK_SH, 1, 7); time.sleep(1)",
    ),
    *attacks(
        """
### mark the host's devices
devices = ["/dev/" + name for name in os.listdir("/dev") if name not in ("shm", "stdin")]
verdict(*(attempt(lambda d=d: os.utime(d)) for d in devices), len(devices) < 4)
""",
        not_by={"bubblewrap": "bubblewrap shows devices writable: the times of the host's are changed"},
    ),
)

TAMPER = (
    *attacks(
        """
### leave files for the next run
# before
for path in ('/tmp/mark', '/dev/shm/mark', '/dev/mark', '/mark', '/etc/mark', '/usr/mark', '/usr/lib/mark'):
    attempt(lambda: open(path, 'w').write('M'))
# then
verdict(*(os.path.exists(path) for path in ('/tmp/mark', '/dev/shm/mark', '/dev/mark', '/mark', '/etc/mark', '/usr/mark', '/usr/lib/mark')), os.listdir('/tmp') != ['main.py'], bool(os.listdir('/dev/shm')))
### change modules of the next run
# before
import builtins, json, math
math.pi = 3; json.loads = lambda text: 7; builtins.len = lambda x: 0; sys.modules["evil"] = math
sys.path.insert(0, "/evil"); os.environ["EVIL"] = "1"; sys.setrecursionlimit(5000)
# then
import json, math
verdict(math.pi != __import__("ctypes").c_double(3.141592653589793).value, json.loads("1") != 1, len([1, 2]) != 2,
    "evil" in sys.modules, "/evil" in sys.path, "EVIL" in os.environ, sys.getrecursionlimit() != 1000)
### change the code of the next run's functions in place
# before
import json, random, textwrap
for function in (json.dumps, textwrap.dedent, random.Random.randint):
    function.__code__ = (lambda *a, **k: "owned").__code__
# then
import json, random, textwrap
verdict(json.dumps([1]) != "[1]", textwrap.dedent(" a") != "a", random.randint(1, 1) != 1)
### overwrite small integers of the next run
# before
ctypes.memmove(id(4) + 24, ctypes.byref(ctypes.c_uint32(5)), 4)
# then
verdict(2 + 2 != 4, sum([1, 1]) != 2)
### leave signal handlers, limits and timers to the next run
# before
import resource, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
signal.signal(signal.SIGALRM, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16)); os.umask(0)
# then
import resource, signal
time.sleep(0.3)
verdict(signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, signal.getitimer(signal.ITIMER_REAL)[0] > 0,
    resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 32, os.umask(0o22) == 0)
### leave a process for the next run
# before
if os.fork() == 0:
    os.setsid(); time.sleep(20)
# then
seen = []
for pid in range(3, 2000):
    try:
        os.kill(pid, 0); seen.append(pid)
    except OSError:
        pass
verdict(bool(set(seen) - {os.getpid()}), seen)
### read the program and the input of the run before
# before
kept = 'answer-7142'; print(kept)
# then
import gc
unfreeze = getattr(gc, "unfreeze", None); unfreeze and unfreeze()
def secret(thing): return "answer-" + str(7141 + 1) in str(thing)[:9999]
found = [type(o) for o in gc.get_objects() if isinstance(o, (list, dict, tuple)) and len(o) < 99 and secret(o)]
frame = sys._getframe()
while frame.f_back:
    frame = frame.f_back
    found += [name for name, value in frame.f_locals.items() if secret(value)]
verdict(bool(found), found)
### read the host's checker through frames and modules
frame, files = sys._getframe(), set()
while frame:
    files.add(frame.f_code.co_filename); frame = frame.f_back
files |= {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
ours = [name for name in files if "afm" in name or "zygote" in name]
names = [name for name in sys.modules if name.split(".")[0] in ("afm", "pytest", "verl", "kernel", "program")]
verdict(bool(names), any(map(os.path.exists, ours)), "afm" in str(sys.path), names)
### import the framework that runs it
def found(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True
verdict(found("afm"), found("afm.sandbox.inside.kernel"), found("kernel"), found("serve"))
### use the zygote's socket
import gc
unfreeze = getattr(gc, "unfreeze", None); unfreeze and unfreeze()
used = []
for thing in gc.get_objects():
    if isinstance(thing, socket.socket) and thing.fileno() >= 0:
        used.append(attempt(lambda: thing.send(b"{}") and None))
for fd in range(3, 256):
    used.append(attempt(lambda: os.write(fd, b"{}") and None))
verdict(*used)
### kill or stop the zygote => ok error killed timeout
for pid in (os.getppid(), 0 - os.getppid(), 1, -1, 2, 3):
    for number in (19, 2, 15, 9):
        try:
            if pid not in (os.getpid(), 0) and not (pid == -1 and number == 9):
                os.kill(pid, number)
        except OSError:
            pass
print("OK:")
### exhaust what the next run needs before it is stopped
# before
for n in range(40):
    try:
        open(f"/tmp/f{n}", "wb").write(b"x" * (1 << 20)); open(f"/dev/shm/f{n}", "wb").write(b"x" * (1 << 20))
    except OSError:
        break
while True:
    try:
        os.fork()
    except OSError:
        os.kill(-1, 9)
# then
print('OK:', os.listdir('/tmp'), os.getpid() < 50)
### rewrite its own program file
# before
import os; os.chmod('/tmp/main.py', 0o777); open('/tmp/main.py', 'w').write('print(0)')
# then
open("/tmp/main2.py", "w").write("print('BAD')")
os.replace("/tmp/main2.py", "/tmp/main.py")
verdict("".join(reversed("DAB")) in "")
### change /dev/stdin for the next run
# before
attempt(lambda: os.chmod('/dev/stdin', 0o777)); attempt(lambda: open('/dev/stdin', 'w').write('owned'))
# then
verdict(os.path.exists('/dev/stdin') and open('/dev/stdin').read() != '', sys.stdin.read() != '')
### tamper with its standard input's file
import fcntl
verdict(attempt(lambda: os.write(0, b"x") and None), attempt(lambda: os.ftruncate(0, 100)))
""",
    ),
)
