"""Checks of this computer: Python, memory, disk, GPUs, sandbox, versions of engines, servers and ports."""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from afm.cli.options import configs_folder
from afm.errors import AfmError, install_advice
from afm.findings import Finding, Level, Report, gpu_findings, package_version
from afm.memory_arithmetic import GIB
from afm.sandbox import SandboxSettings, open_sandbox
from afm.sandbox.interpreter import WARM, Identity, find_interpreter
from afm.settings import Environment, load_settings
from afm.tools.health import unanswered

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_WANTED = {"memory": 6.0, "disk": 10.0}
"""GiB that the quickstart needs, with a margin."""
_START = "tool_servers/servers.sh start"
_OPEN_FILES = 1024
_SHARED_GIB = 2.0
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def diagnose_machine(env: Mapping[str, str], report: Report | None = None) -> list[Finding]:
    """Return all findings about this computer, within seconds. Raises no error and changes nothing."""
    report = report or Report()
    report.checking("computer")
    report.add(*_computer(), *gpu_findings(env))
    report.checking("sandbox")
    report.add(_sandbox())
    report.add(*package_findings())
    report.asked("configs", configs_folder)
    settings = report.asked("environment", load_settings)
    if settings is not None:
        report.add(*_judge(settings), *_cache(settings))
        report.checking("servers")
        report.add(*_servers(settings, report))
    report.add(_browser())
    return report.findings


def _computer() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding(
        Level.OK, "python", f"{platform.python_version()} on {platform.machine()}, {cores} CPU cores"
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    yield _enough(
        "memory",
        memory,
        f"{memory:.1f} GiB",
        "the quickstart needs 5; close other programs, or use a larger machine",
    )
    free = shutil.disk_usage(Path.cwd()).free / GIB
    yield _enough(
        "disk", free, f"{free:.0f} GiB free here", "a model with its checkpoints needs more; free some"
    )
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < _OPEN_FILES:
        yield Finding(Level.WARNING, "files", f"{files} may be open at once; raise it: ulimit -n 65536")
    shared = Path("/dev/shm")
    if (
        shared.is_dir()
        and package_version("ray")
        and (size := shutil.disk_usage(shared).total / GIB) < _SHARED_GIB
    ):
        text = f"/dev/shm has {size:.1f} GiB, Ray keeps objects there; start the container with --shm-size=8g"
        yield Finding(Level.WARNING, "shared memory", text)


def _enough(subject: str, gib: float, seen: str, advice: str) -> Finding:
    enough = gib >= _WANTED[subject]
    return Finding(Level.OK if enough else Level.WARNING, subject, seen if enough else f"{seen}, {advice}")


def _sandbox() -> Finding:
    """Check that a program can run in isolation."""

    async def tried() -> str:
        sandbox = open_sandbox()
        try:
            return (await sandbox.run("print(6 * 7)")).stdout.strip()
        finally:
            await sandbox.close()

    try:
        output = asyncio.run(tried())
    except AfmError as error:
        return Finding(Level.ERROR, "sandbox", " ".join(str(error).split()))
    if output != "42":
        text = f"a program printed {output!r}, expected '42'; see `afm sandbox check`"
        return Finding(Level.ERROR, "sandbox", text)
    python = find_interpreter(SandboxSettings(), Identity.for_process())
    if missing := [name for name in WARM[0] if not python.has(name)]:
        text = f"programs cannot import {' and '.join(missing)}: `afm sandbox install {' '.join(missing)}`"
        return Finding(Level.WARNING, "sandbox", text)
    return Finding(Level.OK, "sandbox", f"a program runs in it ({shutil.which('bwrap') or 'no bubblewrap'})")


def _judge(settings: Environment) -> Iterator[Finding]:
    url = settings.grm_base_url
    if url is None:
        yield Finding(
            Level.INFO, "judge", "none (GRM_BASE_URL): rewards with a judge use exact match instead"
        )
    elif why := asyncio.run(unanswered(url)):
        yield Finding(
            Level.WARNING, "judge", f"no answer from {url} ({why}); start the judge, or correct GRM_BASE_URL"
        )
    else:
        key = "with a key" if settings.grm_api_key else "without a key"
        yield Finding(Level.OK, "judge", f"{settings.grm_model_name} at {url}, {key}")


def _cache(settings: Environment) -> Iterator[Finding]:
    place = settings.web_cache.get_secret_value() if settings.web_cache else ""
    if not place.startswith(("redis://", "rediss://")):
        return
    try:
        import redis
    except ImportError:
        yield Finding(
            Level.ERROR,
            "redis",
            f"WEB_CACHE names a Redis server, but the package redis is not installed; {install_advice('servers')}",
        )
        return
    try:
        redis.Redis.from_url(place, socket_timeout=2, socket_connect_timeout=2).ping()
    except (redis.RedisError, ValueError) as error:
        kind = type(error).__name__  # the message may contain the address with its password
        text = f"the server of WEB_CACHE does not answer ({kind}); start it, or unset WEB_CACHE to use a file"
        yield Finding(Level.WARNING, "redis", text)
    else:
        yield Finding(Level.OK, "redis", "the server of WEB_CACHE answers")


def _servers(settings: Environment, report: Report) -> Iterator[Finding]:
    """Check each tool server: it answers, can start, is not set up, or cannot start."""
    try:
        from tool_servers.shared.command import KINDS, NotSetUpError, checked_command

        folder = configs_folder() / "servers"
    except (ImportError, AfmError) as error:
        yield Finding(Level.WARNING, "servers", f"cannot be checked: {error}; run this inside a checkout")
        return
    ready, unset = list[str](), list[str]()
    for name, kind in KINDS.items():
        try:
            port = kind.port(settings)
            if asyncio.run(unanswered(f"{settings.server_address(port)}/health")) is None:
                ready.append(f"{name} (something answers on port {port})")
                continue
            _, port = checked_command(name, folder, (), settings)
        except NotSetUpError:
            unset.append(name)
        except AfmError as error:
            yield Finding(Level.WARNING, "servers", f"{name}: {' '.join(str(error).split())}")
        else:
            ready.append(f"{name} (can start on port {port})")
    if ready:
        yield Finding(Level.OK, "servers", ", ".join(ready))
    if unset:
        text = (
            f"not set up, needed only for their tools: {', '.join(unset)}. What they lack: {_START} --dry-run"
        )
        yield Finding(Level.INFO, "servers", text)


def _browser() -> Finding:
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    text = found or "no Chromium; only the tests of the viewer need it (requirements/install-chromium.sh)"
    return Finding(Level.OK, "browser", text)


_EXTRAS = ("sft", "rl", "rewards", "eval", "filters", "servers", "trackers", "dense")
_COMMAND = "afm.cli.main:main"


def _distribution() -> metadata.Distribution | None:
    """Return the package that installed the command ``afm``. Other projects have a command of that name, too."""
    commands = metadata.entry_points(group="console_scripts", name="afm")
    return next((command.dist for command in commands if command.value == _COMMAND), None)


def package_findings(asked: Sequence[str] | None = None) -> Iterator[Finding]:
    """Yield one finding per extra: complete, of another version, or absent.

    An extra whose first package is absent counts as not wanted, since each GPU lock has only one engine.

    Args:
        asked: Requirements with their markers; by default those of the installed package.
    """
    own = _distribution()
    try:
        from packaging.requirements import Requirement
    except ImportError:
        own = None
    if own is None:
        yield Finding(Level.WARNING, "packages", f"afm itself is not installed; {install_advice()}")
        return
    requirements = [Requirement(line) for line in (asked or own.requires or ())]
    for extra in ("", *_EXTRAS):
        wanted = [need for need in requirements if _belongs(need, extra) and need.name != own.name]
        if wanted:
            yield _extra(extra, wanted)


def _belongs(requirement: Requirement, extra: str) -> bool:
    if requirement.marker is None:
        return not extra
    return requirement.marker.evaluate({"extra": extra}) and not requirement.marker.evaluate({"extra": ""})


def _extra(extra: str, wanted: Sequence[Requirement]) -> Finding:
    versions = {need.name: package_version(need.name) for need in wanted}
    advice = install_advice(extra)
    first = wanted[0].name
    if extra and not versions[first]:
        return Finding(Level.WARNING, extra, f"{first} is not installed; {advice}")
    wrong = [
        f"{need.name} {versions[need.name] or 'absent'} (expected {need.specifier or 'any'})"
        for need in wanted
        if not need.specifier.contains(versions[need.name] or "0", prereleases=True)
        or not versions[need.name]
    ]
    if wrong:
        return Finding(Level.ERROR, extra or "packages", f"{', '.join(wrong)}; {advice}")
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Finding(Level.OK, extra or "packages", text)
