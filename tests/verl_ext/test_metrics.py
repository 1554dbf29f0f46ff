import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afm.errors import DataError
from verl_ext.checkpoints import begin_checkpoint
from verl_ext.metrics import (
    ENGINE_LOG,
    METRICS_FILE,
    MetricsLog,
    documented,
    progress_line,
    read_metrics,
    validation_means,
)


def engine_line(step: int, score: float) -> str:
    return json.dumps({"step": step, "data": {"rollout/score": score, "timing_s/step": 2.0}}) + "\n"


def test_metrics_get_documented_names_and_keep_the_trainers() -> None:
    trainers = {"rollout/score": 0.5, "actor/entropy": 0.1, "perf/x": 9}
    assert documented(3, trainers) == {"step": 3, "reward": 0.5, "entropy": 0.1, "engine": trainers}


def test_a_validation_has_documented_names_of_its_own() -> None:
    facts = {"score": [1.0, 0.0, -0.5], "acc": [1.0, 0.0, 0.0], "tool_calls": [2, 4, 0]}
    facts |= {"format": [1.0, None, 0.0], "pred": ["a", "b", "c"]}
    found = validation_means(["nq", "nq", "hle"], facts)
    row = documented(20, found | {"timing_s/testing": 3.0})
    row.pop("engine")
    assert row == {
        "step": 20,
        "validation_episodes": 3.0,
        "validation_reward": 0.5 / 3,
        "validation_solved": 1 / 3,
        "validation_tool_calls": 2.0,
        "validation_format": 0.5,
        "validation_seconds": 3.0,
        "validation_by_source": {
            "hle": {"score": -0.5, "acc": 0.0, "format": 0.0},
            "nq": {"score": 0.5, "acc": 0.5, "format": 1.0},
        },
    }
    assert "validation solved 0.333" in progress_line(row, 20)


def test_a_step_is_one_line_for_a_person() -> None:
    row = {"step": 3, "reward": 0.5, "format": 1.0, "groups_kept": 8, "groups_generated": 12, "seconds": 6.14}
    line = "step 3/20  reward 0.500  format 1.000  {}6.1 s"
    assert progress_line(row, 20) == line.format("scores differ in 8 of 12 groups  ")
    assert progress_line(row | {"groups_kept": 12}, 20) == line.format("")


def test_lines_are_copied_as_they_come_and_never_in_halves(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, resume_step=0)
    assert list(log.follow()) == []
    first, second = engine_line(1, 0.25), engine_line(2, 0.5)
    (tmp_path / ENGINE_LOG).write_text(first + second[:20])
    assert [row["step"] for row in log.follow()] == [1]
    (tmp_path / ENGINE_LOG).write_text(first + second)
    assert [row["reward"] for row in log.follow()] == [0.5]
    assert [row["step"] for row in read_metrics(tmp_path / METRICS_FILE)] == [1, 2]


@pytest.fixture
def log(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Start after a step, with the rewards that the engine then logs, by step."""

    def follow(resume_step: int, scores: dict[int, float]) -> list[dict[str, Any]]:
        started = MetricsLog(tmp_path, resume_step=resume_step)
        (tmp_path / ENGINE_LOG).write_text("".join(engine_line(*item) for item in scores.items()))
        return list(started.follow())

    return follow


def rewards(folder: Path) -> list[float]:
    return [row["reward"] for row in read_metrics(folder / METRICS_FILE)]


def test_steps_after_the_checkpoint_are_forgotten_at_a_restart(log: Any, tmp_path: Path) -> None:
    log(0, {1: 0.1, 2: 0.2, 3: 0.3})
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 4, "rew')
    log(2, {3: 0.9})
    assert rewards(tmp_path) == [0.1, 0.2, 0.9]


def test_a_validation_before_a_resumed_training_is_no_second_line_of_its_step(
    log: Any, tmp_path: Path
) -> None:
    assert [row["step"] for row in log(0, {0: 0.0, 1: 0.1, 2: 0.2})] == [0, 1, 2]
    assert [row["step"] for row in log(2, {2: 0.7, 3: 0.3})] == [3]
    assert rewards(tmp_path) == [0.0, 0.1, 0.2, 0.3]


def test_steps_logged_while_the_launcher_was_gone_are_found(tmp_path: Path) -> None:
    (tmp_path / ENGINE_LOG).write_text(engine_line(1, 0.1) + engine_line(2, 0.2))
    MetricsLog(tmp_path, resume_step=1)
    assert [row["step"] for row in read_metrics(tmp_path / METRICS_FILE)] == [1]
    assert not (tmp_path / ENGINE_LOG).exists()


def test_a_step_that_was_saved_and_never_logged_has_the_line_of_its_checkpoint(
    log: Any, tmp_path: Path
) -> None:
    log(0, {1: 0.1})
    begin_checkpoint(
        tmp_path / "checkpoints/global_step_2", {"rollout/score": np.float32(0.25)}, asynchronous=False
    )
    log(2, {3: 0.3})
    assert rewards(tmp_path) == [0.1, 0.25, 0.3]
    log(2, {})
    assert rewards(tmp_path) == [0.1, 0.25]


def test_a_foreign_line_is_named(tmp_path: Path) -> None:
    for line in ("junk", "[1]", '{"no": 1}'):
        (tmp_path / METRICS_FILE).write_text('{"step": 1}\n' + line + "\n")
        with pytest.raises(DataError, match=r"metrics.jsonl:2: expected the metrics of a step"):
            MetricsLog(tmp_path, 1)
