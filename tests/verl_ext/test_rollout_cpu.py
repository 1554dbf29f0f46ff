"""The CPU rollout engine's options and its router (the engine itself trains in test_training.py, in two processes)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from extras import needs

from afm.errors import ConfigError

needs("verl")


def options(**given: Any) -> Any:
    from verl_ext.engines import CpuOptions

    return CpuOptions.of(SimpleNamespace(engine_kwargs={"afm_cpu": given}))


def test_the_cores_are_shared_between_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert options().threads_each is None
    assert options(processes=2).threads_each == 4
    assert options(processes=16).threads_each == 1
    assert options(processes=2, threads=3).threads_each == 3


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine_kwargs\.afm_cpu.*thread"):
        options(thread=1)


def test_an_episode_stays_with_one_of_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.get_actor", lambda name: f"handle of {name}")
    from verl_ext.rollout_cpu import CpuRouter

    router = CpuRouter({"a,b": "handle of a", "c": "handle of c"}, {})
    chosen = {request: router.acquire_server(request)[0] for request in ("x", "y", "z")}
    assert set(chosen.values()) == {"a", "b", "c"}
    assert {request: router.acquire_server(request) for request in chosen} == {
        request: (name, f"handle of {name}") for request, name in chosen.items()
    }
