"""``python -m tool_servers.shared.control start|stop|status|test [NAME ...]``: tool servers in the background."""

from __future__ import annotations

import argparse
import fcntl
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from afm.errors import AfmError, ConfigError, EngineError, UsageError
from afm.settings import load_settings
from tool_servers.shared.command import KINDS
from tool_servers.shared.control_plan import NotSetUpError, Plan, check_apart, named, planned
from tool_servers.shared.control_process import StateFolder, health, resident_mib

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Exit status 0 when all is well, 1 when a server failed or does not run, 2 for wrong usage."""
    words = sys.argv[1:]
    further = words[words.index("--") + 1 :] if "--" in words else []
    given = _parser().parse_intermixed_args(words[: words.index("--")] if "--" in words else words)
    state = StateFolder(given.state, given.log_mib << 20)
    try:
        names = named(given.names)
        if further and (given.verb != "start" or len(names) != 1):
            raise UsageError("arguments after -- go to one server: start NAME -- --port 9002")
        with _alone(given.state):
            match given.verb:
                case "start":
                    return _start(names, given, further, state)
                case "stop":
                    return _stop(names, state, given.wait)
                case "status":
                    return _status(names, state)
                case _:
                    return _test(names, state)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except AfmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tool_servers/servers.sh",
        description="Tool servers in the background: all that are set up, or those named.",
        epilog="Example: tool_servers/servers.sh start wiki_search -- --index indexes/wiki --port 8000",
    )
    parser.add_argument("verb", choices=("start", "stop", "status", "test"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(KINDS)}")
    parser.add_argument(
        "--configs", type=Path, default=ROOT / "configs/servers", help="folder of their YAMLs"
    )
    parser.add_argument(
        "--state", type=Path, default=ROOT / "runs/servers", help="folder of pid files and logs"
    )
    parser.add_argument(
        "--wait", type=float, default=60.0, help="seconds until a start has failed, or a stop becomes a kill"
    )
    parser.add_argument("--log-mib", type=int, default=10, help="a larger log is begun anew; three are kept")
    parser.add_argument("--dry-run", action="store_true", help="start: check everything, start nothing")
    return parser


def _start(names: list[str], given: argparse.Namespace, further: Sequence[str], state: StateFolder) -> int:
    """Check all servers first; when one of them cannot start, none does."""
    environment = load_settings()
    plans: list[Plan] = []
    wrong = 0
    for name in names or KINDS:
        running = state.find(name)
        if running is not None and running.alive():
            _say(name, f"runs already, pid {running.pid}, {running.url}")
            continue
        try:
            plan = planned(name, given.configs, further, environment)
            check_apart(plan, plans)
            plans.append(plan)
        except NotSetUpError as error:
            wrong += bool(names)
            _say(name, f"not set up: {error}")
        except ConfigError as error:
            wrong += 1
            _say(name, f"cannot start: {error}")
    if wrong:
        print("error: nothing was started", file=sys.stderr)
        return 1
    failed = 0
    for plan in plans:
        if given.dry_run:
            _say(plan.name, shlex.join(plan.command()))
            continue
        try:
            running = state.start(plan, given.wait)
        except EngineError as error:
            failed += 1
            _say(plan.name, f"failed: {error}")
        else:
            _say(plan.name, f"started, pid {running.pid}, {running.url}, log {state.log(plan.name)}")
    return 1 if failed else 0


def _stop(names: list[str], state: StateFolder, wait_s: float) -> int:
    killed = 0
    for name in names or KINDS:
        running = state.find(name)
        if running is None or not running.alive():
            state.forget(name)
            if names:
                _say(name, "does not run")
            continue
        began = time.monotonic()
        gently = state.stop(running, wait_s)
        killed += not gently
        how = "stopped" if gently else "killed"
        _say(name, f"{how} after {time.monotonic() - began:.1f} s")
    return 1 if killed else 0


def _status(names: list[str], state: StateFolder) -> int:
    """0 when all that were named run, or, without names, at least one runs and none has failed."""
    well = ill = 0
    for name in names or KINDS:
        running = state.find(name)
        if running is None:
            ill += bool(names)
            _say(name, "stopped")
        elif not running.alive():
            ill += 1
            _say(name, f"has ended by itself; see {state.log(name)}")
        elif (told := health(running.url)) is None:
            ill += 1
            _say(name, f"not healthy, pid {running.pid}, {running.url}; see {state.log(name)}")
        else:
            well += 1
            load = "".join(f", {told[key]} {key}" for key in ("running", "waiting") if key in told)
            up = f"{time.time() - running.since:.0f} s, {resident_mib(running.pid):.0f} MiB{load}"
            _say(name, f"healthy, pid {running.pid}, {running.url}, {up}")
    return 0 if well and not ill else 1


def _test(names: list[str], state: StateFolder) -> int:
    """Ask each running server, or each of those named, for a piece of real work."""
    import httpx

    from tool_servers.shared.control_try import tried

    environment = load_settings()
    passed = failed = 0
    for name in names or KINDS:
        running = state.find(name)
        if running is None or not running.alive():
            if names or running is not None:
                failed += 1
                _say(name, "FAILED: does not run")
            continue
        began = time.monotonic()
        try:
            what = tried(name, running.url, KINDS[name].secret(environment))
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            failed += 1
            _say(name, f"FAILED: {type(error).__name__}: {error}")
        else:
            passed += 1
            _say(name, f"passed in {time.monotonic() - began:.2f} s: {what}")
    if not passed and not failed:
        print("error: no server runs; start one first", file=sys.stderr)
    return 0 if passed and not failed else 1


def _say(name: str, text: str) -> None:
    print(f"{name:<17}{text}", flush=True)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One command at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
