import json
from pathlib import Path

import pytest

from afm.errors import ConfigError, DataError, EngineError, RefusedError, SandboxUnavailableError
from verl_ext.failures import FAILURES_FILE, first_failure, forget_failures, is_fatal, record_failure


@pytest.mark.parametrize(
    ("error", "fatal"),
    [
        (EngineError("server died"), True),
        (RefusedError("too long"), True),
        (ConfigError("no such tool"), True),
        (SandboxUnavailableError("no bwrap"), True),
        (DataError("no question"), False),
        (KeyError("x"), False),
    ],
)
def test_what_every_episode_would_meet_ends_a_run(error: Exception, fatal: bool) -> None:
    assert is_fatal(error) is fatal


def test_the_failure_that_ended_a_run_is_told_from_those_that_it_went_on_without(tmp_path: Path) -> None:
    assert first_failure(tmp_path) is None
    record_failure(tmp_path, "p", KeyError("x"), step=2, episode="2/u/0", fatal=False)
    assert first_failure(tmp_path) is None
    record_failure(tmp_path, "p", EngineError("server died"), step=3)
    assert first_failure(tmp_path) == "EngineError: server died"


def test_a_resumed_run_keeps_the_list_up_to_its_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        record_failure(tmp_path, "p", KeyError("x"), step=step, fatal=False)
    record_failure(tmp_path, "p", EngineError("server died"), step=2)
    with (tmp_path / FAILURES_FILE).open("a") as file:
        file.write('{"step": 1, "half a li')
    forget_failures(tmp_path, 2)
    lines = (tmp_path / FAILURES_FILE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    forget_failures(tmp_path)
    assert not (tmp_path / FAILURES_FILE).exists()
