"""Attacks on the host and its files."""

from __future__ import annotations

from afm.sandbox.conformance.attack import Attack

ATTACKS = (
    Attack(
        "connect to a port of the host",
        """
verdict(attempt(lambda: socket.create_connection(("127.0.0.1", PORT), 2)))""",
    ),
    Attack(
        "connect to the host's abstract socket",
        """
def connect(): socket.socket(socket.AF_UNIX).connect(SOCKET)
verdict(attempt(connect))""",
    ),
    Attack(
        "resolve a name",
        """
verdict(attempt(lambda: socket.getaddrinfo("example.org", 80)))""",
    ),
    Attack(
        "open vsock, packet and netlink sockets",
        """
verdict(*(attempt(lambda f=f: socket.socket(f, socket.SOCK_DGRAM)) for f in (16, 17, 40, 38)))""",
    ),
    Attack(
        "read the host's accounts",
        """
verdict(*(attempt(lambda p=p: open(p).read()) for p in ("/etc/passwd", "/etc/shadow", "/etc/hostname")))""",
    ),
    Attack(
        "read a host file",
        """
verdict(attempt(lambda: open(SECRET_PATH).read()))""",
    ),
    Attack(
        "read a host file through a symbolic link",
        """
os.symlink(SECRET_PATH, "link")
verdict(attempt(lambda: open("link").read()))""",
    ),
    Attack(
        "read a host file through a hard link",
        """
verdict(attempt(lambda: os.link(SECRET_PATH, "link")))""",
    ),
    Attack(
        "see more than Python",
        """
extra = set(os.listdir("/")) - {"bin", "dev", "etc", "lib", "lib32", "lib64", "packages", "sbin", "tmp", "usr"}
homes = [p for p in ("/root", "/home", "/var", "/proc", "/sys", "/run", "/opt", "/mnt") if os.path.exists(p)]
shells = [p for p in ("/bin/sh", "/usr/bin/env", "/usr/bin/su", "/usr/bin/mount") if os.path.exists(p)]
verdict(*(["BAD"] if extra or homes or shells else []), extra, homes, shells)""",
    ),
    Attack(
        "find secrets in the environment",
        """
verdict(*(["BAD"] if any("SECRET" in value for value in os.environ.values()) else []), sorted(os.environ))""",
    ),
    Attack(
        "find open descriptors",
        """
def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
verdict(*(f"BAD {fd}" for fd in range(3, 1024) if is_open(fd)))""",
    ),
    Attack(
        "write outside /tmp",
        """
places = ("/", "/usr", "/usr/lib", "/etc", "/dev", "/bin", os.path.dirname(os.__file__))
verdict(*(attempt(lambda p=p: open(p + "/mark", "w")) for p in places))""",
    ),
    Attack(
        "make a read-only file writable",
        """
verdict(attempt(lambda: os.chmod(os.__file__, 0o777)), attempt(lambda: open(os.__file__, "a")))""",
    ),
    Attack(
        "change identity",
        """
verdict(os.getuid() == 0, attempt(lambda: os.setuid(0)), attempt(lambda: os.setgid(0)),
    attempt(lambda: os.setgroups([0])))""",
    ),
    Attack(
        "run a setuid program",
        """
nosuid = os.statvfs("/usr/lib").f_flag & os.ST_NOSUID
new_privileges = libc.prctl(39, 0, 0, 0, 0)
verdict("BAD" if not nosuid or new_privileges != 1 else "OK", nosuid, new_privileges)""",
    ),
    Attack(
        "have capabilities",
        """
data = (ctypes.c_uint32 * 6)()
libc.capget(ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), ctypes.byref(data))
verdict(any(data), [libc.prctl(23, c, 0, 0, 0) for c in (0, 7, 21)].count(1) > 0)""",
    ),
    Attack(
        "read a host file in a race of links",
        """
import threading
seen, over = [], time.time() + 1
def swap():
    while time.time() < over:
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
while time.time() < over:
    try:
        seen.append(open("door").read())
    except OSError:
        pass
verdict(any("SECRET" in text for text in seen), len(seen) > 0)""".replace(", len(seen) > 0", ""),
    ),
    Attack(
        "link or rename files of Python into its folder",
        """
import json
verdict(attempt(lambda: os.link(json.__file__, "/tmp/json.py")), attempt(lambda: os.rename(json.__file__, "/tmp/json.py")),
    attempt(lambda: os.unlink(json.__file__)), attempt(lambda: os.utime(json.__file__)))""",
    ),
    Attack(
        "climb out of the root directory",
        """
fd = os.open("/", os.O_RDONLY)
os.chdir("/")
for _ in range(50):
    os.chdir("..")
verdict(os.path.exists("/root") or os.path.exists("/home"), os.path.exists("/zygote"), os.path.exists("/jail"),
    attempt(lambda: os.open("../../../../root", os.O_RDONLY, dir_fd=fd)))""",
    ),
    Attack(
        "find out whose machine it is",
        """
import pwd
def account():
    try:
        return pwd.getpwuid(os.getuid()).pw_name == "nobody" and False
    except KeyError:
        return False
verdict(os.uname().nodename != "sandbox", account(), len(socket.if_nameindex()) > 1 if not attempt(socket.socket) else False)""",
    ),
    Attack(
        "read kernel messages and devices",
        """
paths = ("/dev/kmsg", "/dev/mem", "/dev/sda", "/dev/vda", "/dev/kvm", "/dev/fuse", "/dev/ptmx", "/dev/pts", "/dev/net/tun")
verdict(*(attempt(lambda p=p: os.open(p, os.O_RDONLY)) for p in paths), call(SYSLOG, 3, 0, 0))""",
    ),
    Attack(
        "use a port of another run",
        """
verdict(*(attempt(lambda f=f: socket.socket(f, k)) for f in (socket.AF_INET, socket.AF_INET6) for k in (1, 2, 3)))""",
    ),
    Attack(
        "read the files of a run beside it",
        """
found = []
for top in ("/", "/tmp", "/dev/shm"):
    for folder, _, files in os.walk(top):
        found += [f for f in files if f == "beside.txt"]
verdict(bool(found))""",
        beside="open('/tmp/beside.txt', 'w').write('s'); open('/dev/shm/beside.txt', 'w').write('s')\nimport time; time.sleep(1)",
    ),
)
