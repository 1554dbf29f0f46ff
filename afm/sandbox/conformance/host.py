"""Attacks on the host: on its files and sockets, and through its system calls."""

from __future__ import annotations

from afm.sandbox.conformance.attack import attacks

REACH = (
    *attacks(
        """
### connect to a port of the host
verdict(attempt(lambda: socket.create_connection(("127.0.0.1", PORT), 2)))
### connect to the host's abstract socket
def connect(): socket.socket(socket.AF_UNIX).connect(SOCKET)
verdict(attempt(connect))
### resolve a name
verdict(attempt(lambda: socket.getaddrinfo("example.org", 80)))
### open vsock, packet and netlink sockets
verdict(*(attempt(lambda f=f: socket.socket(f, socket.SOCK_DGRAM)) for f in (16, 17, 40, 38)))
### read the host's accounts
verdict(*(attempt(lambda p=p: open(p).read()) for p in ("/etc/passwd", "/etc/shadow", "/etc/hostname")))
### read a host file
verdict(attempt(lambda: open(SECRET_PATH).read()))
### read a host file through a symbolic link
os.symlink(SECRET_PATH, "link")
verdict(attempt(lambda: open("link").read()))
### read a host file through a hard link
verdict(attempt(lambda: os.link(SECRET_PATH, "link")))
### see more than Python
extra = set(os.listdir("/")) - {"bin", "dev", "etc", "lib", "lib32", "lib64", "packages", "sbin", "tmp", "usr"}
homes = [p for p in ("/root", "/home", "/var", "/proc", "/sys", "/run", "/opt", "/mnt") if os.path.exists(p)]
shells = [p for p in ("/bin/sh", "/usr/bin/env", "/usr/bin/su", "/usr/bin/mount") if os.path.exists(p)]
verdict(*(["BAD"] if extra or homes or shells else []), extra, homes, shells)
### find secrets in the environment
verdict(*(["BAD"] if any("SECRET" in value for value in os.environ.values()) else []), sorted(os.environ))
### find open descriptors
def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
verdict(*(f"BAD {fd}" for fd in range(3, 1024) if is_open(fd)))
### write outside /tmp
places = ("/", "/usr", "/usr/lib", "/etc", "/dev", "/bin", os.path.dirname(os.__file__))
verdict(*(attempt(lambda p=p: open(p + "/mark", "w")) for p in places))
### make a read-only file writable
verdict(attempt(lambda: os.chmod(os.__file__, 0o777)), attempt(lambda: open(os.__file__, "a")))
### change identity
verdict(os.getuid() == 0, attempt(lambda: os.setuid(0)), attempt(lambda: os.setgid(0)),
    attempt(lambda: os.setgroups([0])))
### run a setuid program
nosuid = os.statvfs("/usr/lib").f_flag & os.ST_NOSUID
new_privileges = libc.prctl(39, 0, 0, 0, 0)
verdict("BAD" if not nosuid or new_privileges != 1 else "OK", nosuid, new_privileges)
### have capabilities
data = (ctypes.c_uint32 * 6)()
libc.capget(ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), ctypes.byref(data))
verdict(any(data), [libc.prctl(23, c, 0, 0, 0) for c in (0, 7, 21)].count(1) > 0)
### read a host file in a race of links
import threading
seen, over = [], time.process_time() + 0.4
def swap():
    while time.process_time() < over:
        for make in (lambda: open("door", "w").close(), lambda: os.symlink(SECRET_PATH, "door")):
            try:
                os.unlink("door")
            except OSError:
                pass
            try:
                make()
            except OSError:
                pass
threading.Thread(target=swap, daemon=True).start()
while time.process_time() < over:
    try:
        seen.append(open("door").read())
    except OSError:
        pass
verdict(any("SECRET" in text for text in seen))
### link or rename files of Python into its folder
import json
verdict(attempt(lambda: os.link(json.__file__, "/tmp/json.py")), attempt(lambda: os.rename(json.__file__, "/tmp/json.py")),
    attempt(lambda: os.unlink(json.__file__)), attempt(lambda: os.utime(json.__file__)))
### climb out of the root directory
fd = os.open("/", os.O_RDONLY)
os.chdir("/")
for _ in range(50):
    os.chdir("..")
verdict(os.path.exists("/root") or os.path.exists("/home"), os.path.exists("/zygote"), os.path.exists("/jail"),
    attempt(lambda: os.open("../../../../root", os.O_RDONLY, dir_fd=fd)))
### find out whose machine it is
import pwd
def account():
    try:
        return pwd.getpwuid(os.getuid()).pw_name == "nobody" and False
    except KeyError:
        return False
verdict(os.uname().nodename != "sandbox", account(), len(socket.if_nameindex()) > 1 if not attempt(socket.socket) else False)
### read kernel messages and devices
paths = ("/dev/kmsg", "/dev/mem", "/dev/sda", "/dev/vda", "/dev/kvm", "/dev/fuse", "/dev/ptmx", "/dev/pts", "/dev/net/tun")
verdict(*(attempt(lambda p=p: os.open(p, os.O_RDONLY)) for p in paths), call(SYSLOG, 3, 0, 0))
### use a port of another run
verdict(*(attempt(lambda f=f: socket.socket(f, k)) for f in (socket.AF_INET, socket.AF_INET6) for k in (1, 2, 3)))
""",
    ),
    *attacks(
        """
### read the files of a concurrent run
found = []
for top in ("/", "/tmp", "/dev/shm"):
    for folder, _, files in os.walk(top):
        found += [f for f in files if f == "beside.txt"]
verdict(bool(found))
""",
        neighbour="open('/tmp/beside.txt', 'w').write('s'); open('/dev/shm/beside.txt', 'w').write('s')\nimport time; time.sleep(1)",
    ),
)

KERNEL = (
    *attacks(
        r"""
### make a user namespace
verdict(call(UNSHARE, 0x10000000), call(CLONE, 0x10000000 | 17, 0, 0, 0, 0))
### make a user namespace by clone3
import struct
arguments = struct.pack("<11Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)
verdict(call(435, ctypes.create_string_buffer(arguments), len(arguments)))
### make other namespaces
verdict(*(call(UNSHARE, flag) for flag in (0x20000, 0x40000000, 0x20000000, 0x8000000, 0x4000000, 0x80)))
### mount
verdict(libc.mount(b"t", b"/tmp", b"tmpfs", 0, None) == 0, libc.umount2(b"/tmp", 2) == 0,
    call(428, -100, b"/usr", 1), call(430, b"tmpfs", 0), call(CHROOT, b"/tmp"))
### list the host's mounts
import struct
request = ctypes.create_string_buffer(struct.pack("IIQQ", 24, 0, 0xFFFFFFFFFFFFFFFF, 0))
buffer = ctypes.create_string_buffer(4096)
listed = libc.syscall(LISTMOUNT, request, buffer, ctypes.c_long(64), 0)
wanted = ctypes.create_string_buffer(struct.pack("IIQQ", 24, 0, struct.unpack_from("Q", buffer)[0], 0x1f))
verdict(listed > 0, call(STATMOUNT, wanted, buffer, ctypes.c_long(4096), 0))
### make a device
verdict(attempt(lambda: os.mknod("/tmp/disk", 0o60666, os.makedev(8, 0))))
### trace other processes
child = os.fork()
if child == 0:
    time.sleep(3); os._exit(0)
attached = [libc.ptrace(16, p, 0, 0) == 0 for p in (1, os.getppid(), child)]
os.kill(child, 9)
verdict(*attached)
### read another process's memory
buffer = ctypes.create_string_buffer(64)
vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 64)
verdict(call(PROCESS_VM_READV, 1, vector, 1, vector, 1, 0), attempt(lambda: open("/proc/1/mem", "rb")))
### steal a descriptor of process 1
verdict(call(438, os.pidfd_open(1), 3, 0))
### forge the launcher's report
paths = ("/proc/1/fd/3", "/proc/1/fd/4", "/proc/self/fd/3")
verdict(*(attempt(lambda p=p: os.open(p, os.O_WRONLY)) for p in paths),
    *(attempt(lambda fd=fd: os.write(fd, b"0 0\n")) for fd in range(3, 64)))
### use the kernel keyring
verdict(call(ADD_KEY, b"user", b"k", b"v", 1, -4), call(KEYCTL, 10, -4, b"user", b"k", 0))
### use shared memory and queues that outlive it
verdict(call(SHMGET, 0x5b5b, 4096, 0o1666), call(MSGGET, 0x5b5b, 0o1666), call(SEMGET, 0x5b5b, 1, 0o1666),
    call(MQ_OPEN, b"mark", 0o102, 0o666, 0))
### use bpf, perf, userfaultfd and io_uring
buffer = ctypes.create_string_buffer(256)
verdict(call(BPF, 0, buffer, 128), call(PERF_EVENT_OPEN, buffer, 0, -1, -1, 0), call(USERFAULTFD, 0), call(425, 4, buffer),
    call(426, 0, 0, 0, 0), call(447, 0))
### change the clock and the host name
verdict(attempt(lambda: socket.sethostname("owned")), attempt(lambda: time.clock_settime(0, 0)))
### push keys into a terminal
import fcntl
verdict(attempt(lambda: os.open("/dev/tty", os.O_RDWR)), *(attempt(lambda f=f: fcntl.ioctl(f, 0x5412, b"x")) for f in (0, 1, 2)))
### signal everything
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
verdict(bool(seen), seen)
### raise its priority
def realtime(): os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
verdict(attempt(lambda: os.setpriority(os.PRIO_PROCESS, 0, -5)), attempt(realtime))
### crowd one core, as if the machine starved it
before = os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(before)})
verdict(os.sched_getaffinity(0) != before and "BAD")
### open files by handle
buffer = ctypes.create_string_buffer(128)
verdict(call(NAME_TO_HANDLE_AT, -100, b"/usr", buffer, buffer, 0), call(OPEN_BY_HANDLE_AT, -100, buffer, 0))
### call the kernel by a foreign convention
import mmap
if os.uname().machine != "x86_64":
    print("OK: no foreign convention here"); raise SystemExit
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b827000040" "0f05" "c3"))  # getpid by the x32 convention
child = os.fork()
if child == 0:
    ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    os._exit(0)
verdict(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0)
### bring process 1 down by its limits => error killed
import resource
for name in ("CPU", "AS", "NOFILE", "FSIZE"):
    try:
        resource.prlimit(1, getattr(resource, "RLIMIT_" + name), (0, 0))
    except (OSError, ValueError):
        pass
os._exit(7)
### give process 1 a child that it takes for the program => error 5
child = libc.syscall(CLONE, 0x8000 | 17, 0, 0, 0, 0)
if child == 0:
    os._exit(0)
time.sleep(0.3)
os._exit(5)
### signal process 1 through a pidfd => error 6
import signal
fd = os.pidfd_open(1)
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGSYS):
    try:
        signal.pidfd_send_signal(fd, number)
    except OSError:
        pass
time.sleep(0.2); os._exit(6)
""",
    ),
    *attacks(
        """
### signal concurrent runs through process groups => ok error killed
import signal
for number in (signal.SIGTERM, signal.SIGKILL):
    for target in (lambda: os.killpg(1, number), lambda: os.kill(-1, number), lambda: os.killpg(2, 0) if False else None):
        try:
            target()
        except OSError:
            pass
print("OK:")
""",
        neighbour="import time; time.sleep(1); print('unharmed')",
    ),
)
