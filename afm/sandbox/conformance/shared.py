"""Attacks on what all runs share with each other and with the host: kernel tables, locks, devices."""

from __future__ import annotations

from afm.sandbox.conformance.attack import Attack

ATTACKS = (
    Attack(
        "hoard kernel memory in attributes of files",
        """
import struct
open("held", "w").close()
file, value = os.open("held", os.O_RDWR), ctypes.create_string_buffer(60000)
verdict(attempt(lambda: os.setxattr("held", "user.a", value)), attempt(lambda: os.setxattr(file, "user.b", value)),
    attempt(lambda: os.setxattr("held", "user.c", value, follow_symlinks=False)),
    call(SETXATTRAT, -100, b"held", 0, b"user.d", struct.pack("QII", ctypes.addressof(value), 60000, 0), ctypes.c_size_t(16)))""",
    ),
    Attack(
        "lock a file that other runs and the host use",
        """
import fcntl, json
shown = [open(os.__file__), open(json.__file__), open("/dev/null")]
verdict(*(attempt(lambda f=f, k=k: fcntl.flock(f, k | fcntl.LOCK_NB)) for f in shown for k in (fcntl.LOCK_EX, fcntl.LOCK_SH)))""",
    ),
    Attack(
        "speak to a run beside it through locks on bytes",
        """
import fcntl, struct
def asked(file, command):
    lock = struct.unpack("hhqqi4x", fcntl.fcntl(file, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)))
    return None if lock[0] == fcntl.F_UNLCK else True
shown, null = open(os.__file__), open("/dev/null", "r+b", 0)
verdict(attempt(lambda: asked(shown, fcntl.F_GETLK)) == "BAD", asked(shown, fcntl.F_GETLK), asked(null, fcntl.F_GETLK),
    attempt(lambda: asked(shown, 36)), attempt(lambda: fcntl.fcntl(shown, 37, bytes(32)) and None),
    *(attempt(lambda d=d: fcntl.lockf(open(d, "r+b", 0), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 7))
        for d in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")))""",
        beside="import fcntl, os, time\nheld = open(os.__file__); fcntl.lockf(held, fcntl.LOCK_SH, 1, 7); time.sleep(1)",
    ),
    Attack(
        "leave marks at files that all runs see",
        """
import fcntl, struct
verdict(*(attempt(lambda c=c, p=p: fcntl.fcntl(open(p, "rb"), c, struct.pack("Q", 2)) and None)
    for c in (1036, 1038) for p in (os.__file__, "/dev/null")))""",
    ),
    Attack(
        "lease a file of the host or be told of its changes",
        """
import fcntl
lease, folder = os.open(os.__file__, os.O_RDONLY), os.open(os.path.dirname(os.__file__), os.O_RDONLY)
own = os.open("own", os.O_CREAT | os.O_RDONLY)
verdict(*(attempt(lambda f=f: fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_RDLCK) and None) for f in (lease, own)),
    attempt(lambda: fcntl.fcntl(folder, fcntl.F_NOTIFY, 1) and None))""",
    ),
    Attack(
        "take the machine's contexts for asynchronous input and output",
        """
context = ctypes.c_ulong(0)
verdict(call(IO_SETUP, 1000, ctypes.byref(context)))""",
    ),
    Attack(
        "watch what the host and other runs do with files",
        """
verdict(*(call(number, 0) for number in (INOTIFY_INIT, INOTIFY_INIT1) if number))""",
    ),
    Attack(
        "make the host write its disks out",
        """
import fcntl, mmap
shown = open(os.__file__, "rb")
extents = bytearray(32); extents[8:17] = b"\\xff" * 8 + b"\\x01"
wrong = ctypes.c_long(-1), ctypes.c_long(0), ctypes.c_long(0), ctypes.c_long(0)
verdict(*(reaches_kernel(number, *wrong) for number in (FSYNC, FDATASYNC, SYNCFS, SYNC_FILE_RANGE)),
    reaches_kernel(MSYNC, ctypes.c_long(1), ctypes.c_long(4096), 4), attempt(lambda: os.fsync(shown)) is not True and "BAD",
    *(attempt(lambda c=c: fcntl.ioctl(shown, c, extents) and None) for c in (0xC020660B, 0x9408, 0x80089418)))""",
    ),
    Attack(
        "drop or read what the host keeps in its cache",
        """
wrong = ctypes.c_long(-1), ctypes.c_long(0), ctypes.c_long(0), ctypes.c_long(4)
byte = ctypes.create_string_buffer(64)
page = ctypes.addressof(byte) & ~4095
shown = os.open(os.__file__, os.O_RDONLY)
vector = (ctypes.c_void_p * 2)(ctypes.addressof(byte), 64)
verdict(*(call(PREADV2, shown, vector, ctypes.c_long(1), ctypes.c_long(0), ctypes.c_long(0), flag) for flag in (8, 128)),
    *(reaches_kernel(number, *wrong) for number in (FADVISE64, READAHEAD)),
    *(reaches_kernel(MADVISE, ctypes.c_long(1), ctypes.c_long(4096), advice) for advice in (20, 21)),
    call(MINCORE, ctypes.c_void_p(page), ctypes.c_long(4096), byte),
    call(CACHESTAT, shown, byte, ctypes.create_string_buffer(64), 0))""",
    ),
    Attack(
        "share equal pages with other runs, which shows in the time that a write takes",
        """
import mmap
page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
verdict(call(MADVISE, ctypes.c_void_p(address), ctypes.c_long(4096), 12), libc.prctl(67, 1, 0, 0, 0) == 0)""",
    ),
    Attack(
        "mark the host's devices",
        """
devices = ["/dev/" + name for name in os.listdir("/dev") if name not in ("shm", "stdin")]
verdict(*(attempt(lambda d=d: os.utime(d)) for d in devices), len(devices) < 4)""",
        not_by={"bubblewrap": "bubblewrap shows devices writable: the times of the host's are changed"},
    ),
    Attack(
        "name a pair of sockets, or use it as a server",
        """
pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
stream = socket.socketpair()
verdict(attempt(lambda: pair[0].bind("\\0meeting")), attempt(lambda: stream[0].bind("/tmp/meeting")),
    attempt(lambda: pair[1].connect("\\0meeting")), attempt(lambda: stream[1].listen()))""",
    ),
    Attack(
        "have the kernel name a socket, and write to a name",
        """
pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
attempt(lambda: pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1))
pair[0].send(b"x")
def write():
    try:
        pair[0].sendto(b"x", b"\\0meeting")
    except ConnectionRefusedError:
        pass  # the kernel looked for it
verdict(bool(pair[0].getsockname()), pair[0].getsockname(), attempt(write))""",
    ),
    Attack(
        "keep descriptors in flight between sockets, which are counted for its user",
        """
import array
pair = socket.socketpair()
sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 200))]
verdict(attempt(lambda: pair[0].sendmsg([b"x"], sent) and None), call(SENDMMSG, pair[0].fileno(), None, 0, 0))""",
    ),
)
