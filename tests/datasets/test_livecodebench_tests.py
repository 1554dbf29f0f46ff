import base64
import json
import pickle
import zlib
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from afm.datasets.readers.programs import TESTS_FILE, write_complete_tests
from afm.errors import DataError
from afm.evaluation.config import load_config
from afm.evaluation.job import load_tasks, sources_of
from afm.evaluation.manifest import Conditions, make_manifest
from afm.models.base import SamplingParams
from afm.rewards.code_tests.problem import PrivateTests, question_id, read_problem, without_complete_tests

ROOT = Path(__file__).resolve().parents[2]


def owners_row(name, *outputs, packed=True):
    """The owner's layout with our own tests."""
    private = json.dumps(
        [{"input": f"{at}\n", "output": text, "testtype": "stdin"} for at, text in enumerate(outputs)]
    )
    if packed:
        private = base64.b64encode(zlib.compress(pickle.dumps(private))).decode()
    return {
        "question_id": name,
        "question_content": "Say it.",
        "public_test_cases": json.dumps([{"input": "1\n", "output": "1\n", "testtype": "stdin"}]),
        "private_test_cases": private,
        "metadata": "{}",
    }


def written(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_folder_is_made_of_the_owners_files(said, tmp_path):
    written(tmp_path / "lcb/test.jsonl", owners_row("a", "1"), owners_row("b", "2", packed=False))
    written(tmp_path / "lcb/test2.jsonl", owners_row("a", "1", "3"))
    printed = said("data", "livecodebench", tmp_path / "lcb", "--output-dir", tmp_path / "tests")
    assert f"export LIVECODEBENCH_DATA_PATH={tmp_path / 'tests'}" in printed.replace("\n", "")
    tests = PrivateTests(tmp_path / "tests")
    outputs = [case.expected for case in read_problem(tests.row("a")).printing]
    assert outputs == ["1\n", "1", "3"]  # the last file counts
    assert len(read_problem(tests.row("b")).printing) == 2
    assert tests.row("c") is None
    assert json.loads((tmp_path / "tests/manifest.json").read_text())["counts"] == {"problems": 2}


def test_prepared_tasks_are_such_a_folder_too(tmp_path):
    task = {"id": "a", "question": "q", "ground_truth": owners_row("a", "1"), "data_source": "livecodebench"}
    written(tmp_path / "livecodebench_v4.jsonl", task)
    assert len(read_problem(PrivateTests(tmp_path).row("a")).printing) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question_id": "a", "stdin": ["1"]}, r"test\.jsonl:2: no `question_id` with `private_test_cases`"),
        (owners_row("a") | {"private_test_cases": "AAAA"}, r"test\.jsonl:2: tests: packed tests"),
    ],
)
def test_a_row_without_readable_tests_ends_it_and_leaves_nothing(tmp_path, row, message):
    file = written(tmp_path / "test.jsonl", owners_row("b", "1"), row)
    with pytest.raises(DataError, match=message):
        write_complete_tests([file], tmp_path / "tests")
    assert not (tmp_path / "tests" / TESTS_FILE).exists()


def test_a_pickle_that_runs_code_stays_unread(tmp_path):
    """AFM's script writes one pickle per problem."""

    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    (tmp_path / "a.pkl").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError, match=r"\.pkl files, which are not read, .* afm data livecodebench"):
        without_complete_tests([{"question_id": "a", "stdin": ["1"]}], tmp_path)
    assert not (tmp_path / "sprung").exists()


def departures(data, *words):
    config = load_config(ROOT / "configs/eval/livecodebench_v4.yaml", ["model=m", f"data={data}", *words])
    first = config.routes().first
    sampling = SamplingParams(1, temperature=0.8)
    conditions = Conditions(sampling, limits=first.limits, sources=sources_of(config))
    manifest = make_manifest(load_tasks(config), first.declared, "m", conditions)
    departed = manifest.sources["benchmark"]["departures"]
    return [text for text in departed if not text.startswith("prompt:")]


def test_sample_tests_are_a_departure_until_the_complete_ones_are_there(tmp_path, shared, monkeypatch):
    monkeypatch.delenv("LIVECODEBENCH_DATA_PATH", raising=False)
    data, published = shared("data/code_math/livecodebench_v4.parquet"), tmp_path / "lcb"
    (departure,) = departures(data)
    assert departure.startswith(
        "tests: only samples for 100 of 100 problems here, complete tests published; set "
    )
    rows = pq.read_table(data).to_pylist()
    names = [question_id(row["reward_model"]["ground_truth"]) for row in rows]
    assert len(set(names)) == 100
    written(published / "test4.jsonl", *(owners_row(name, "1") for name in names[1:]))
    write_complete_tests([published], tmp_path / "tests")
    monkeypatch.setenv("LIVECODEBENCH_DATA_PATH", str(tmp_path / "tests"))
    (departure,) = departures(data)
    assert departure.startswith("tests: only samples for 1 of 100 problems")
    written(published / "test5.jsonl", owners_row(names[0], "1"))
    write_complete_tests([published], tmp_path / "tests")
    assert departures(data) == []
    assert departures(data, f"rewards.code_tests.livecodebench={published}") == []
