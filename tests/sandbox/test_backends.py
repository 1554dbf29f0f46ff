"""Opening a sandbox by name and settings."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from afm.errors import ConfigError, SandboxUnavailableError
from afm.sandbox import SandboxLimits, limits_from, open_sandbox
from afm.sandbox.backends import SandboxSettings
from afm.sandbox.interpreter import Identity, find_interpreter


def test_an_unknown_backend_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="unknown sandbox backend 'bublewrap', did you mean 'bubblewrap'"):
        open_sandbox("bublewrap")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="nework"):
        open_sandbox(nework=True)


def test_limits_from_a_mapping() -> None:
    assert limits_from({"wall_s": 3, "cpu_s": 2}) == SandboxLimits(wall_s=3, cpu_s=2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"wal_s": 3}, "unknown sandbox limit 'wal_s', did you mean 'wall_s'"),
        ({"cpu_s": 2.5}, "cpu_s: expected a positive int, got 2.5"),
        ({"wall_s": -1}, "wall_s: expected a positive float, got -1"),
        ({"processes": True}, "processes: expected a positive int, got True"),
        ({"memory_bytes": "1G"}, "memory_bytes: expected a positive int, got '1G'"),
        ({"wall_s": float("nan")}, "wall_s: expected a positive float, got nan"),
        ({"wall_s": float("inf")}, "wall_s: expected at most 86400, got more"),
        ({"wall_s": 10**400}, "wall_s: expected at most 86400, got more"),
        ({"memory_bytes": 10**30}, "memory_bytes: expected at most 17592186044416, got more"),
        ({"cpu_s": 10**5000}, "cpu_s: expected at most 86400, got more"),
        ({3: 4}, "unknown sandbox limit 3"),
    ],
)
def test_wrong_limits_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        limits_from(values)
    if not values.keys() & {"wal_s", 3}:
        with pytest.raises(ConfigError, match=message):
            SandboxLimits(**values)  # type: ignore[arg-type]


WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"packages": "/usr"}, "packages: got '/usr', expected a list"),
    ({"packages": ["/"]}, "packages: '/' would show the host's own files"),
    ({"packages": ["/usr/.."]}, "packages: '/usr/..' would show the host's own files"),
    ({"packages": ["/proc"]}, "packages: '/proc' would show the host's own files"),
    ({"packages": ["opt/packages"]}, "packages: got 'opt/packages', expected an absolute path"),
    ({"packages": [3]}, r"packages: got \[3\], expected a list"),
    ({"packages": [""]}, r"packages: got \[''\], expected a list"),
    ({"binds": "/usr"}, "binds: got '/usr', expected a list"),
    ({"binds": b"/usr"}, "binds: got b'/usr', expected a list"),
    ({"binds": ["/"]}, "binds: '/' would show the host's own files"),
    ({"binds": ["data"]}, "binds: got 'data', expected an absolute path"),
    ({"binds": ["/tmp"]}, "binds: /tmp cannot be shown to programs"),
    ({"binds": ["/dev/shm/data"]}, "binds: /dev/shm/data cannot be shown to programs"),
    ({"max_parallel": -1}, "max_parallel: got -1, expected a whole number from 1 on"),
    ({"max_parallel": 0}, "max_parallel: got 0, expected a whole number from 1 on"),
    ({"max_parallel": "2"}, "max_parallel: got '2', expected a whole number"),
    ({"max_parallel": True}, "max_parallel: got True, expected a whole number"),
    ({"max_waiting": -1}, "max_waiting: got -1, expected a whole number from 0 on"),
    ({"limits": 7}, "limits: got 7, expected a mapping"),
    ({"limits": {"wall_s": float("nan")}}, "wall_s: expected a positive float, got nan"),
    ({"python": 3}, "python: got 3, expected a path"),
]
OF_ZYGOTES: list[tuple[dict[str, Any], str]] = [
    ({"warm": "numpy"}, "warm: got 'numpy', expected lists in a list"),
    ({"warm": ["numpy", "scipy"]}, "warm: got 'numpy', expected a list such as"),
    ({"start_s": float("nan")}, "start_s: got nan, expected seconds"),
    ({"start_s": 0}, "start_s: got 0, expected seconds"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
@pytest.mark.parametrize("backend", ["auto", "zygote", "bubblewrap", "nsjail"])
def test_options_of_the_wrong_kind_are_refused_before_anything_runs(
    backend: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_sandbox(backend, **options)


@pytest.mark.parametrize(("options", "message"), OF_ZYGOTES)
@pytest.mark.parametrize("backend", ["auto", "zygote"])
def test_options_of_zygotes_are_checked_too(backend: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_sandbox(backend, **options)


@pytest.mark.parametrize("packages", ["/usr", ["/"], ["relative"]])
def test_an_interpreter_sees_no_such_packages(packages: Any) -> None:
    with pytest.raises(ConfigError, match="sandbox option packages"):
        find_interpreter(None, Identity.for_process(), packages)


@pytest.mark.sandbox
@pytest.mark.parametrize("option", ["packages", "binds"])
@pytest.mark.parametrize("backend", ["auto", "zygote", "bubblewrap"])
async def test_what_is_not_there_is_named(backend: str, option: str) -> None:
    sandbox = open_sandbox(backend, **{option: ["/nonexistent/data"]})
    for _ in range(2):
        with pytest.raises(SandboxUnavailableError, match=f"{option}: /nonexistent/data does not exist, or "):
            await sandbox.run("print(1)")
    await sandbox.close()


@pytest.mark.sandbox
async def test_a_warm_package_that_is_not_there_is_told(caplog: pytest.LogCaptureFixture) -> None:
    sandbox = open_sandbox("zygote", max_parallel=1, warm=[["json", "numpyy"]])
    assert (await sandbox.run("import json; print(json.dumps(1))")).stdout == "1\n"
    assert "numpyy: ModuleNotFoundError" in (await sandbox.isolation())[1]
    await sandbox.close()
    assert "numpyy: ModuleNotFoundError" in caplog.text


def test_settings_of_a_file_are_the_options() -> None:
    assert SandboxSettings().options() == {"backend": "auto"}
    given = {"backend": "zygote", "warm": [["numpy"]], "packages": ["/opt/packages"], "start_s": 5}
    assert SandboxSettings.model_validate(given).options() == {
        "backend": "zygote",
        "warm": (("numpy",),),
        "packages": ("/opt/packages",),
        "start_s": 5.0,
    }
    for wrong in (
        {"packages": "/opt"},
        {"warm": "numpy"},
        {"warm": ["numpy"]},
        {"max_parallel": "x"},
        {"lmits": 1},
    ):
        with pytest.raises(ValidationError):
            SandboxSettings.model_validate(wrong)


LOW = """
import resource
from afm.sandbox import SandboxLimits
from afm.sandbox.policy import kernel_limits
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 50))
resource.setrlimit(resource.RLIMIT_CPU, (4, 4))
limits = kernel_limits(SandboxLimits())
print(limits["NOFILE"], limits["CPU"], limits["FSIZE"])
"""


def test_limits_that_this_process_has_itself_are_not_raised() -> None:
    done = subprocess.run([sys.executable, "-c", LOW], capture_output=True, text=True, check=True)
    assert done.stdout == "(50, 50) (4, 4) (16777216, 16777216)\n"
