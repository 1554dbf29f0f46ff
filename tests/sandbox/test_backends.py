"""Opening a sandbox by name and settings."""

from __future__ import annotations

import pytest

from afm.errors import ConfigError
from afm.sandbox import SandboxLimits, limits_from, open_sandbox


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
    ],
)
def test_wrong_limits_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        limits_from(values)
