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
ctypes.set_errno(0)
libc.syscall(SYNC)
verdict(ctypes.get_errno() == 0, call(SYNCFS, os.open(os.__file__, os.O_RDONLY)))""",
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
        "keep descriptors in flight between sockets, which are counted for its user",
        """
import array
pair = socket.socketpair()
sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 200))]
verdict(attempt(lambda: pair[0].sendmsg([b"x"], sent) and None), call(SENDMMSG, pair[0].fileno(), None, 0, 0))""",
    ),
)
