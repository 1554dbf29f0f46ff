from pathlib import Path

import pytest

from afm.cli.pipeline import STAGES_FILE, Stage, read_stages, run_stages
from afm.errors import ConfigError


def counting(counts: dict[str, int], name: str) -> Stage:
    def run() -> str:
        counts[name] = counts.get(name, 0) + 1
        return f"{name} ran"

    return Stage(name, name.title(), run)


def test_a_failed_stage_runs_again_and_finished_ones_do_not(tmp_path: Path) -> None:
    counts: dict[str, int] = {}
    stages = [counting(counts, "a"), counting(counts, "b")]
    with pytest.raises(ZeroDivisionError):
        run_stages([stages[0], Stage("b", "B", lambda: str(1 / 0))], tmp_path, {"seed": 0}, lambda _: None)
    run_stages(stages, tmp_path, {"seed": 0}, lambda _: None)
    finished = run_stages([*stages, counting(counts, "c")], tmp_path, {"seed": 0}, lambda _: None)
    assert counts == {"a": 1, "b": 1, "c": 1}
    assert [stage.note for stage in finished] == ["a ran", "b ran", "c ran"]
    noted = [(stage.name, stage.note) for stage in read_stages(tmp_path / STAGES_FILE)]
    assert noted == [
        ("a", "a ran"),
        ("b", ""),
        ("b", "b ran"),
        ("c", "c ran"),
    ]  # the time of a failure counts


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    run_stages([], tmp_path, {"seed": 0, "smoke": False}, lambda _: None)
    with pytest.raises(ConfigError, match=r"seed: 0 -> 1"):
        run_stages([], tmp_path, {"seed": 1, "smoke": False}, lambda _: None)


def test_a_torn_last_line_does_not_count_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    counts: dict[str, int] = {}
    run_stages([counting(counts, "a")], tmp_path, {}, lambda _: None)
    with (tmp_path / STAGES_FILE).open("a") as file:
        file.write('{"name": "b", "sec')
    for _ in range(2):
        run_stages([counting(counts, "a"), counting(counts, "b")], tmp_path, {}, lambda _: None)
    assert counts == {"a": 1, "b": 1}
