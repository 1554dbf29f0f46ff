"""Two real evaluations of a scripted solver, compared by the command that people use."""

import json
import shutil
from functools import partial

import pytest


@pytest.fixture
def compare(afm):
    return partial(afm, "eval", "compare")


@pytest.fixture(scope="module")
def runs(solver, tmp_path_factory):
    """8 questions answered without the tool, always wrong, and with it, always right; and so twice each."""
    import asyncio

    folder = tmp_path_factory.mktemp("runs")
    for name, percent, rounds in (("never", 0, 1), ("always", 100, 1), ("twice", 100, 2)):
        asyncio.run(solver.run(folder / name, percent, 8, rounds=rounds))
    return folder


def test_runs_are_compared_on_the_questions_they_share(runs, compare):
    result = compare(runs / "never", runs / "always", "--json")
    first, second = json.loads(result.stdout)
    assert first["metrics"]["pass_at_1"]["value"] == 0
    assert first["paired"] is None
    assert (second["paired"]["gained"], second["paired"]["lost"]) == (8, 0)
    assert second["changes"] == []  # another model is what a comparison is about
    assert "+100.0 points" in compare(runs / "never", runs / "always").stdout


def test_runs_that_measured_something_else_are_refused_unless_told(runs, compare):
    refused = compare(runs / "never", runs / "twice", status=1)
    assert "did not measure the same thing: rounds: 1 -> 2" in refused.stderr
    assert "--anyway" in refused.stderr
    printed = compare(runs / "never", runs / "twice", "--anyway")
    assert "on 8 questions: 8 better, 0 worse" in printed.stdout
    assert "not comparable: rounds: 1 -> 2" in printed.stdout


def test_wrong_use_and_broken_figures_are_told_in_a_line(runs, compare, tmp_path):
    compare(runs / "never", status=2)
    nothing = compare(runs / "never", tmp_path, status=1)
    assert "no episodes here; expected the output_dir of `afm eval`" in nothing.stderr
    broken = tmp_path / "broken"
    shutil.copytree(runs / "always", broken)
    (broken / "metrics.json").write_text('{"questions":')
    result = compare(runs / "never", broken, status=1)
    assert "metrics.json: metrics in another format" in result.stderr
    assert "Traceback" not in result.stderr
