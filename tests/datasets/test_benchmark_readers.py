"""Benchmarks as their owners publish them: rows written here in the same form."""

import pytest

from afm.datasets import write_tasks
from afm.datasets.readers import READERS
from afm.errors import DataError
from afm.trajectory.record import SEALING_KEY, encrypt


def read(name, row):
    return READERS[name].read(row, "default-1")


def test_gaia_asks_about_text_alone() -> None:
    row = {"task_id": "t1", "Question": " How many? ", "Level": "2", "Final answer": "17", "file_name": ""}
    task = read("gaia", row)
    assert (task.id, task.question, task.ground_truth) == ("t1", "How many?", ["17"])
    assert (task.data_source, task.extra_info) == ("gaia", {"level": "2"})
    with pytest.raises(DataError, match="about a file"):
        read("gaia", row | {"file_name": "a.xlsx"})
    with pytest.raises(DataError, match="withheld"):
        read("gaia", row | {"Final answer": "?"})


def test_gaia_as_the_afm_repository_and_simple_deep_searcher_publish_it() -> None:
    row = {
        "id": 1,
        "task_id": "t1",
        "question": "How many?",
        "answer": "17",
        "Level": 2,
        "Annotator_Metadata": {},
    }
    task = read("gaia", row)
    assert (task.id, task.question, task.ground_truth) == ("t1", "How many?", ["17"])
    assert (task.data_source, task.extra_info) == ("gaia", {"level": "2"})
    searcher = {
        "id": 1,
        "task_id": "t1",
        "Question": "How many?",
        "answer": ["17"],
        "Level": 2,
        "source": "gaia",
    }
    assert read("gaia", searcher) == task


def test_webwalker_keeps_level_domain_and_language() -> None:
    info = {"Level": "hard", "domain": "game", "lang": "en", "type": "multi_source", "golden_path": ["a->b"]}
    row = {"question": "q?", "answer": "a", "root_url": "https://example.org", "info": info}
    task = read("webwalker", row)
    assert (task.id, task.question, task.ground_truth, task.data_source) == (
        "default-1",
        "q?",
        "a",
        "webwalker",
    )
    assert task.extra_info == {
        "level": "hard",
        "root_url": "https://example.org",
        "domain": "game",
        "lang": "en",
        "type": "multi_source",
    }


def test_hle_asks_about_text_alone() -> None:
    row = {
        "id": "h",
        "question": "q",
        "image": "",
        "answer": "B",
        "answer_type": "multipleChoice",
        "category": "Math",
    }
    task = read("hle", row)
    assert (task.id, task.ground_truth, task.data_source) == ("h", ["B"], "hle")
    assert task.extra_info == {"answer_type": "multipleChoice", "category": "Math"}
    with pytest.raises(DataError, match="about an image"):
        read("hle", row | {"image": "data:image/png;base64,AAAA"})


def test_browsecomp_is_decrypted_and_nobody_writes_it(tmp_path) -> None:
    row = {
        "problem": encrypt("Who?", "k"),
        "answer": encrypt("Ada", "k"),
        "problem_topic": "x",
        "canary": "k",
    }
    task = read("browsecomp", row)
    assert (task.question, task.ground_truth, task.extra_info[SEALING_KEY]) == ("Who?", ["Ada"], "k")
    with pytest.raises(DataError, match="published encrypted and is not written in plain form"):
        write_tasks([task], tmp_path / "tasks.jsonl")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="reader=null"):
        read("browsecomp", {"problem": "Who?", "answer": "Ada"})


def test_rows_for_training_are_not_made_of_it_either(tmp_path) -> None:
    from afm.agents import load_agent
    from afm.datasets.rl_files import write_rl

    row = {"problem": encrypt("Who?", "k"), "answer": encrypt("Ada", "k"), "canary": "k"}
    with pytest.raises(DataError, match="published encrypted"):
        write_rl([read("browsecomp", row)], load_agent("web"), tmp_path / "rl.parquet")
