"""A run folder holds one set of settings and one process."""

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from afm.errors import ConfigError
from afm.runs.folder import RunFolder


def test_a_folder_with_results_names_every_key_that_differs(tmp_path: Path) -> None:
    folder, results = RunFolder(tmp_path), [tmp_path / "rows.jsonl"]
    folder.claim({"seed": 0, "plan": {"deep": {"rate": 1}}, "old": 1}, results)
    settings = {"seed": 0, "plan": {"deep": {"rate": 2}}, "old": 1}
    folder.claim(settings, results)  # nothing was made yet
    results[0].write_text("{}\n")
    folder.claim(settings, results)
    with pytest.raises(
        ConfigError, match=r"\(new: None -> 3, old: 1 -> None, plan.deep.rate: 2 -> 4\); choose"
    ):
        folder.claim({"seed": 0, "plan": {"deep": {"rate": 4}}, "new": 3}, results)


def test_long_values_are_shown_where_they_differ(tmp_path: Path) -> None:
    folder, results = RunFolder(tmp_path), [tmp_path / "rows.jsonl"]
    stages = [{"complexity": {"min_calls": 2, "min_tools": 1}}, {"format": {"tools": None}}]
    folder.claim({"stages": [*stages, {"correction": {"times": 3}}]}, results)
    results[0].write_text("{}\n")
    with pytest.raises(ConfigError, match=r"stages: \.\.\..*\{'correction': .* -> \.\.\..*'repetition'"):
        folder.claim({"stages": [*stages, {"repetition": {}}]}, results)


def test_a_digest_that_differs_is_named_by_its_file(tmp_path: Path) -> None:
    folder, results = RunFolder(tmp_path, "--output-dir"), [tmp_path / "rows.jsonl"]
    files = {"team": "team.py", "tasks": "the tasks of train.csv"}
    folder.claim({"team": "a1", "tasks": "b2", "seed": 0}, results, files)
    results[0].write_text("{}\n")
    folder.claim({"team": "a1", "tasks": "b2", "seed": 0}, results, files)
    with pytest.raises(
        ConfigError,
        match=r"\(seed: 0 -> 1, team\.py changed\); choose another --output-dir, or delete the folder",
    ):
        folder.claim({"team": "c3", "tasks": "b2", "seed": 1}, results, files)


def test_a_run_may_wait_for_the_one_before_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with ExitStack() as first:
        first.enter_context(folder.locked())
        threading.Timer(0.3, first.pop_all().close).start()
        with folder.locked(wait_s=30):
            pass


@pytest.mark.parametrize("name", [".lock", None])
def test_a_second_run_is_kept_out_until_the_first_ends(tmp_path: Path, name: str | None) -> None:
    folder = RunFolder(tmp_path, "output_dir")
    with folder.locked(name=name), pytest.raises(ConfigError, match="or choose another output_dir"):
        folder.locked(name=name).__enter__()
    with folder.locked(name=name):
        pass
