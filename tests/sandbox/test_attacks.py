"""What hostile programs try. Each one is bounded and prints OK when it was stopped, BAD when it got through."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from afm.sandbox import Sandbox, SandboxLimits, open_sandbox
from afm.sandbox.seccomp import CLONE, DENIED

pytestmark = pytest.mark.sandbox

LIMITS = SandboxLimits(wall_s=8.0, cpu_s=4, memory_bytes=512 << 20, file_bytes=8 << 20)
SECRET = "SECRET-HOST-FILE"

PRELUDE = """
import ctypes, errno, os, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    result = libc.syscall(*arguments)
    return "BAD" if result >= 0 else os.strerror(ctypes.get_errno())
def verdict(*answers):
    print("BAD:" if any(answer is True or "BAD" in str(answer) for answer in answers) else "OK:", answers)
def attempt(action):
    try:
        return action() is None or True
    except (OSError, PermissionError) as error:
        return type(error).__name__
"""

ATTACKS = {
    "connect to the host": """
verdict(attempt(lambda: socket.create_connection(("127.0.0.1", PORT), 2)))""",
    "abstract unix socket": """
def connect(): socket.socket(socket.AF_UNIX).connect("\\0afm-canary")
verdict(attempt(connect))""",
    "resolve a name": """
verdict(attempt(lambda: socket.getaddrinfo("example.org", 80)))""",
    "vsock, packet and netlink sockets": """
verdict(*(attempt(lambda f=f: socket.socket(f, socket.SOCK_DGRAM)) for f in (16, 17, 40, 38)))""",
    "read the host's accounts": """
verdict(*(attempt(lambda p=p: open(p).read()) for p in ("/etc/passwd", "/etc/shadow", "/etc/hostname")))""",
    "read a host file": """
verdict(attempt(lambda: open(SECRET_PATH).read()))""",
    "read it through a symbolic link": """
os.symlink(SECRET_PATH, "link")
verdict(attempt(lambda: open("link").read()))""",
    "read it through a hard link": """
verdict(attempt(lambda: os.link(SECRET_PATH, "link")))""",
    "memory in anonymous files, which no limit counts": """
verdict(attempt(lambda: os.close(os.memfd_create("hoard"))))""",
    "see more than Python": """
extra = set(os.listdir("/")) - {"bin", "dev", "etc", "lib", "lib32", "lib64", "sbin", "tmp", "usr"}
homes = [p for p in ("/root", "/home", "/var", "/proc", "/sys", "/run", "/opt", "/mnt") if os.path.exists(p)]
shells = [p for p in ("/bin/sh", "/usr/bin/env", "/usr/bin/su", "/usr/bin/mount") if os.path.exists(p)]
verdict(*(["BAD"] if extra or homes or shells else []), extra, homes, shells)""",
    "find secrets in the environment": """
verdict(*(["BAD"] if any("SECRET" in value for value in os.environ.values()) else []), sorted(os.environ))""",
    "find open descriptors": """
def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
verdict(*(f"BAD {fd}" for fd in range(3, 1024) if is_open(fd)))""",
    "write outside /tmp": """
places = ("/", "/usr", "/usr/lib", "/etc", "/dev", "/bin", os.path.dirname(os.__file__))
verdict(*(attempt(lambda p=p: open(p + "/mark", "w")) for p in places))""",
    "make a read-only file writable": """
verdict(attempt(lambda: os.chmod(os.__file__, 0o777)), attempt(lambda: open(os.__file__, "a")))""",
    "change identity": """
verdict(os.getuid() == 0, attempt(lambda: os.setuid(0)), attempt(lambda: os.setgid(0)),
    attempt(lambda: os.setgroups([0])))""",
    "run a setuid program": """
nosuid = os.statvfs("/usr/lib").f_flag & os.ST_NOSUID
new_privileges = libc.prctl(39, 0, 0, 0, 0)
verdict("BAD" if not nosuid or new_privileges != 1 else "OK", nosuid, new_privileges)""",
    "have capabilities": """
data = (ctypes.c_uint32 * 6)()
libc.capget(ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), ctypes.byref(data))
verdict(any(data), [libc.prctl(23, c, 0, 0, 0) for c in (0, 7, 21)].count(1) > 0)""",
    "raise its limits": """
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
    "new user namespace": """
verdict(call(UNSHARE, 0x10000000), call(CLONE, 0x10000000 | 17, 0, 0, 0, 0))""",
    "new user namespace by clone3": """
import struct
arguments = struct.pack("<11Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)
verdict(call(435, ctypes.create_string_buffer(arguments), len(arguments)))""",
    "other namespaces": """
verdict(*(call(UNSHARE, flag) for flag in (0x20000, 0x40000000, 0x20000000, 0x8000000, 0x4000000, 0x80)))""",
    "mount": """
verdict(libc.mount(b"t", b"/tmp", b"tmpfs", 0, None) == 0, libc.umount2(b"/tmp", 2) == 0,
    call(428, -100, b"/usr", 1), call(430, b"tmpfs", 0), call(CHROOT, b"/tmp"))""",
    "make a device": """
verdict(attempt(lambda: os.mknod("/tmp/disk", 0o60666, os.makedev(8, 0))))""",
    "ptrace": """
child = os.fork()
if child == 0:
    time.sleep(3); os._exit(0)
attached = [libc.ptrace(16, p, 0, 0) == 0 for p in (1, os.getppid(), child)]
os.kill(child, 9)
verdict(*attached)""",
    "read another process's memory": """
buffer = ctypes.create_string_buffer(64)
vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 64)
verdict(call(PROCESS_VM_READV, 1, vector, 1, vector, 1, 0), attempt(lambda: open("/proc/1/mem", "rb")))""",
    "steal a descriptor of process 1": """
verdict(call(438, os.pidfd_open(1), 3, 0))""",
    "forge the launcher's report": """
paths = ("/proc/1/fd/3", "/proc/1/fd/4", "/proc/self/fd/3")
verdict(*(attempt(lambda p=p: os.open(p, os.O_WRONLY)) for p in paths),
    *(attempt(lambda fd=fd: os.write(fd, b"0 0\\n")) for fd in range(3, 64)))""",
    "kernel keyring": """
verdict(call(ADD_KEY, b"user", b"k", b"v", 1, -4), call(KEYCTL, 10, -4, b"user", b"k", 0))""",
    "shared memory and queues": """
verdict(call(SHMGET, 0x5b5b, 4096, 0o1666), call(MSGGET, 0x5b5b, 0o1666), call(SEMGET, 0x5b5b, 1, 0o1666),
    call(MQ_OPEN, b"mark", 0o102, 0o666, 0))""",
    "bpf, perf, userfaultfd, io_uring": """
buffer = ctypes.create_string_buffer(256)
verdict(call(BPF, 0, buffer, 128), call(PERF_EVENT_OPEN, buffer, 0, -1, -1, 0), call(USERFAULTFD, 0), call(425, 4, buffer),
    call(426, 0, 0, 0, 0), call(447, 0))""",
    "change the clock and the host name": """
verdict(attempt(lambda: socket.sethostname("owned")), attempt(lambda: time.clock_settime(0, 0)))""",
    "push keys into a terminal": """
import fcntl
verdict(attempt(lambda: os.open("/dev/tty", os.O_RDWR)), *(attempt(lambda f=f: fcntl.ioctl(f, 0x5412, b"x")) for f in (0, 1, 2)))""",
    "signal everything": """
seen = []
for pid in range(1, 5000):
    if pid not in (1, os.getpid()):
        try:
            os.kill(pid, 0); seen.append(pid)
        except OSError:
            pass
for number in (9, 15, 19, 2):
    try:
        os.kill(1, number); os.kill(-1, number)
    except OSError:
        pass
time.sleep(0.2)
verdict(bool(seen), seen)""",
    "fork bomb": """
count = 0
try:
    while count < 300:
        if os.fork() == 0:
            time.sleep(5); os._exit(0)
        count += 1
except OSError as error:
    pass
verdict(count >= 40, count)""",
    "thread bomb": """
import threading
count = 0
try:
    while count < 300:
        threading.Thread(target=time.sleep, args=(2,), daemon=True).start(); count += 1
except RuntimeError:
    pass
verdict(count >= 40, count)
sys.stdout.flush(); os._exit(0)""",
    "much memory": """
blocks = []
try:
    while len(blocks) < 30:
        blocks.append(b"x" * (100 << 20))
except MemoryError:
    pass
size = len(blocks); blocks.clear()
verdict(size >= 6, size)""",
    "many open files": """
files = []
try:
    while len(files) < 10000:
        files.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
verdict(len(files) > 100, len(files))""",
    "a large file": """
import signal
def fill():
    with open("large", "wb") as file:
        for _ in range(100):
            file.write(b"x" * (1 << 20)); file.flush()
verdict(attempt(fill), os.path.getsize("large") > 9 << 20)""",
    "many files in /tmp": """
total = 0
try:
    for number in range(40):
        with open(f"f{number}", "wb") as file:
            file.write(b"x" * (1 << 20)); total += 1
except OSError:
    pass
verdict(total > 8, total)""",
    "many files in /dev/shm": """
total = 0
try:
    for number in range(40):
        with open(f"/dev/shm/f{number}", "wb") as file:
            file.write(b"x" * (1 << 20)); total += 1
except OSError:
    pass
verdict(total > 8, total)""",
    "a core dump": """
child = os.fork()
if child == 0:
    ctypes.string_at(0)
_, status = os.waitpid(child, 0)
verdict(os.WCOREDUMP(status), os.listdir("/tmp") != ["main.py"])""",
}

COLUMN = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
NUMBERS = {name.upper(): numbers[COLUMN] for name, numbers in (DENIED | {"clone": CLONE}).items()}


@pytest.fixture(scope="module")
def sandbox(backend: str) -> Iterator[Sandbox]:
    made = open_sandbox(backend, limits=LIMITS)
    yield made
    asyncio.run(made.close())


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """Canaries on the host: a port, an abstract socket, a world-readable file, a variable."""
    folder = tmp_path_factory.mktemp("host")
    secret = folder / "secret.txt"
    secret.write_text(SECRET, encoding="utf-8")
    secret.chmod(0o644)
    os.environ["AFM_TEST_KEY"] = "SECRET-VARIABLE"
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0afm-canary")
        abstract.listen(5)
        for server in (port, abstract):
            threading.Thread(target=accept, args=(server,), daemon=True).start()
        yield {"PORT": port.getsockname()[1], "SECRET_PATH": str(secret)}
    del os.environ["AFM_TEST_KEY"]


def accept(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        connection.close()


def armed(attack: str, host: dict[str, object]) -> str:
    constants = {**NUMBERS, **host}
    lines = [f"{name} = {value!r}" for name, value in constants.items()]
    return "\n".join([PRELUDE, *lines, attack])


@pytest.mark.parametrize("name", ATTACKS)
async def test_attack_is_stopped(name: str, sandbox: Sandbox, host: dict[str, object]) -> None:
    result = await sandbox.run(armed(ATTACKS[name], host))
    assert result.stdout.startswith("OK:"), (result.reason, result.stdout, result.stderr)


REAL = ("connect to the host", "abstract unix socket", "read a host file", "read the host's accounts")


@pytest.mark.parametrize("name", REAL)
def test_the_canaries_are_real(name: str, host: dict[str, object]) -> None:
    """Outside the sandbox these attacks get through."""
    code = armed(ATTACKS[name], host)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("BAD:")
