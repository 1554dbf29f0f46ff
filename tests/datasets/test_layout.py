import json
import os
import shutil
import time
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from extras import LazyPackage

from afm.datasets import Task, read_tasks
from afm.datasets.hub_sets import Lock, LockedSet
from afm.datasets.rl_files import HeldOut
from afm.datasets.row_files import data_files, published_rows
from afm.errors import DataError
from afm.evaluation.job import task_files

datasets = LazyPackage("datasets")

SETS = """
sets:
  some_rl:
    repository: own/Some-RL-Dataset
    files: ["*.jsonl", "*.parquet"]
    prepare:
      - {reader: afm_rl, into: rl, name: rl/train, agent: mhqa, validation: {rows: 3}}
  some_sft:
    repository: own/Some-SFT-Dataset
    files: ["*.json"]
    prepare:
      - {reader: afm_sft, into: sft, name: sft/some_sft, published: 4}
"""
QUESTIONS = [
    {"question": f"who built tower {n}?", "answer": [str(n)], "data_source": "nq"} for n in range(40)
]
SFT = [{"instruction": f"q{n}", "input": "", "output": f"<answer>{n}</answer>"} for n in range(4)]


def tasks(texts):
    return [
        Task(id=str(n), question=text, ground_truth="a", data_source="nq") for n, text in enumerate(texts)
    ]


def divided(rows, count, seed=0):
    held = HeldOut(count, seed)
    stay = list(held.split(iter(rows)))
    return {task.id for task in stay}, {task.id for task in held.tasks}


def test_the_held_out_questions_are_so_many_and_the_same_in_any_order():
    rows = tasks(f"question {n}" for n in range(500))
    stay, taken = divided(rows, 20)
    assert len(taken) == 20
    assert stay | taken == {task.id for task in rows}
    assert not stay & taken
    assert divided(rows[::-1], 20) == (stay, taken)
    assert divided(rows, 20, seed=1)[1] != taken
    assert len(divided(rows[:100], 20)[1]) == 10
    assert divided(rows[:1], 20) == ({"0"}, set())


def test_rows_of_one_question_are_never_in_both_parts():
    rows = tasks(f"question  {n % 50}" if n < 50 else f"question {n % 50}" for n in range(200))
    for seed in range(20):
        stay, taken = divided(rows, 5, seed)
        assert len(taken) == 20
        assert not {int(one) % 50 for one in stay} & {int(one) % 50 for one in taken}


@pytest.fixture
def prepare(said, tmp_path):
    """Run the command on ``tmp_path/raw``, which first has rows of both sets, and return its output."""
    (tmp_path / "sets.yaml").write_text(SETS)
    write_raw(tmp_path / "raw", QUESTIONS)
    words = ("data", "prepare", "published", tmp_path / "sets.yaml", "--data", tmp_path / "raw")
    return partial(said, *words, "--output-dir", tmp_path)


def write_raw(folder, rows):
    (folder / "some_rl").mkdir(parents=True, exist_ok=True)
    (folder / "some_sft").mkdir(parents=True, exist_ok=True)
    (folder / "some_rl/train-00000-of-00001.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "some_sft/sft.json").write_text(json.dumps(SFT))


def written(tmp_path):
    parts = [list(read_tasks(tmp_path / f"rl/{part}.parquet")) for part in ("train", "val")]
    return [sorted(task.question for task in part) for part in parts]


@pytest.mark.slow
def test_prepare_makes_both_splits_and_leaves_what_is_made(prepare, tmp_path):
    printed = prepare()
    assert "warning" not in printed
    trained, held_out = written(tmp_path)
    assert (len(trained), len(held_out)) == (37, 3)
    assert sorted(trained + held_out) == sorted(row["question"] for row in QUESTIONS)
    made = (tmp_path / "rl/train.parquet").stat().st_mtime_ns
    assert "(made before)" in prepare()
    assert (tmp_path / "rl/train.parquet").stat().st_mtime_ns == made
    (tmp_path / "rl/val.parquet").unlink()
    prepare()
    assert written(tmp_path) == [trained, held_out]
    write_raw(tmp_path / "raw", QUESTIONS[:-1])
    prepare()
    assert sum(map(len, written(tmp_path))) == 39


def test_a_kill_between_both_files_leaves_no_mixture(prepare, tmp_path, monkeypatch):
    prepare()
    write_raw(tmp_path / "raw", [row | {"question": f"when? {row['question']}"} for row in QUESTIONS])
    rename, renamed = Path.replace, []

    def killed(path, target):
        if Path(target).suffix == ".parquet" and Path(target).parent == tmp_path / "rl":
            renamed.append(Path(target).name)
            if len(renamed) == 2:
                raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    prepare(status=130)
    monkeypatch.undo()
    assert renamed == ["val.parquet", "train.parquet"]
    assert not (tmp_path / "rl/train.parquet").exists()
    prepare()
    trained, held_out = written(tmp_path)
    assert all(question.startswith("when?") for question in trained + held_out)
    assert len({*trained, *held_out}) == 40


def test_what_a_killed_process_left_is_cleared_away(prepare, tmp_path):
    nobody, now = 2**22 + 1, time.time()
    names = [f"train.parquet.{nobody}.tmp", f"val.parquet.{nobody}.tmp", f"train.parquet.{os.getppid()}.tmp"]
    (tmp_path / "rl").mkdir()
    for name in names:
        (tmp_path / "rl" / name).write_bytes(b"half")
    for name, age in zip(names, (7_200, 60, 7_200), strict=True):
        os.utime(tmp_path / "rl" / name, (now - age, now - age))
    prepare()
    assert [(tmp_path / "rl" / name).exists() for name in names] == [False, True, True]


def test_what_another_command_made_is_not_overwritten(prepare, afm, tmp_path):
    prepare()
    kept, target = tmp_path / "kept.jsonl", tmp_path / "rl/train.parquet"
    kept.write_text("\n".join(json.dumps(row) for row in QUESTIONS[:20]))
    afm("data", "prepare", "rl", kept, "-o", target, "--agent", "mhqa", "--validation", 2)
    selected = written(tmp_path)
    for part, count in (("train", 18), ("val", 2)):
        note = json.loads((tmp_path / f"rl/{part}.parquet.manifest.json").read_text())
        assert (note["split"], note["counts"]["rows"]) == (part, count)
    assert "train.parquet: not replaced, because another command made it" in prepare()
    assert written(tmp_path) == selected
    target.unlink()
    prepare()
    assert list(map(len, written(tmp_path))) == [37, 3]
    target.write_bytes(target.read_bytes() + b"damage")
    prepare()
    assert list(map(len, written(tmp_path))) == [37, 3]


def test_nothing_made_leaves_what_was_made_before(prepare, tmp_path):
    prepare()
    before = written(tmp_path)
    write_raw(tmp_path / "raw", [{"text": "no question"}])
    assert "fits reader 'afm_rl'" in prepare(status=1)
    assert written(tmp_path) == before
    [bad] = (tmp_path / "rl/train.bad_rows.jsonl").read_text().splitlines()
    assert json.loads(bad)["line"] == 1


@pytest.fixture
def save(prepare, tmp_path):
    """Save rows as AFM's own download does, by split or in shards, next to the set of the other agent."""
    shutil.rmtree(tmp_path / "raw")
    (tmp_path / "sets.yaml").write_text(SETS.replace('"*.json"', '"*.json", "*.parquet"'))
    datasets.Dataset.from_list(SFT).save_to_disk(tmp_path / "raw/Some-SFT-Dataset")

    def run(rows, shards):
        make, split = datasets.Dataset.from_list, isinstance(rows, dict)
        made = (
            datasets.DatasetDict({name: make(part) for name, part in rows.items()}) if split else make(rows)
        )
        made.save_to_disk(tmp_path / "raw/Some-RL-Dataset", num_shards=shards)

    return run


def test_every_shard_of_a_saved_folder_counts(prepare, save, tmp_path):
    save(QUESTIONS, 2)
    prepare()
    noted = json.loads((tmp_path / "rl/train.manifest.json").read_text())
    assert {len(digest) for digest in noted["inputs"].values()} == {64}
    save([QUESTIONS[0] | {"question": "who built none?"}, *QUESTIONS[1:]], 2)
    prepare("--only", "some_rl")
    assert "who built none?" in chain(*written(tmp_path))


def test_a_set_that_changed_its_number_of_rows_is_an_error(prepare, tmp_path):
    common = {"kind": "dataset", "revision": None, "patterns": (), "commit": "c", "files": ()}
    lock = tmp_path / "raw/download.lock.json"
    Lock(sets={"some_rl": LockedSet(repository="own/Some-RL-Dataset", **common)}).write(lock)
    prepare()
    assert json.loads(lock.read_text())["sets"]["some_rl"]["rows"] == {"train": 40}
    before = written(tmp_path)
    write_raw(tmp_path / "raw", QUESTIONS[:-1])
    printed = prepare(status=1)
    assert "set 'some_rl', split 'train': 39 rows, but 40 when it was first prepared" in printed
    assert written(tmp_path) == before
    prepare("--new-counts")
    assert json.loads(lock.read_text())["sets"]["some_rl"]["rows"] == {"train": 39}
    assert sum(map(len, written(tmp_path))) == 39


def test_folders_that_afm_s_own_download_saved_are_read(prepare, save, afm, tmp_path):
    save({"train": QUESTIONS[:30], "test": QUESTIONS[30:]}, {"train": 2, "test": 1})
    prepare()
    assert sorted(chain(*written(tmp_path))) == sorted(row["question"] for row in QUESTIONS)
    assert json.loads((tmp_path / "sft/some_sft.json").read_text()) == SFT
    saved, out = tmp_path / "raw/Some-RL-Dataset", tmp_path / "tasks.jsonl"
    afm("data", "prepare", "tasks", saved, "-o", out, "--data-source", "nq")
    assert len(list(read_tasks(out))) == 40
    assert {file.suffix for file in task_files(saved / "test")} == {".arrow"}


def test_a_saved_folder_that_is_not_whole_is_an_error(tmp_path):
    datasets.Dataset.from_list(QUESTIONS).save_to_disk(tmp_path / "saved")
    [file] = data_files(tmp_path / "saved")
    assert [row["question"] for _, row in published_rows(file)] == [row["question"] for row in QUESTIONS]
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DataError, match="not a complete arrow stream"):
        list(published_rows(file))
    file.unlink()
    with pytest.raises(DataError, match=r"no such file, though .*state\.json names it"):
        data_files(tmp_path / "saved")
    (tmp_path / "saved/state.json").write_text("{")
    with pytest.raises(DataError, match="not a file of save_to_disk"):
        data_files(tmp_path / "saved")
