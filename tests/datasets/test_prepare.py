import hashlib
import json
import tracemalloc

import pyarrow.parquet as pq
import pytest

from afm.agents import AgentSpec, load_agent
from afm.datasets import Task, read_tasks
from afm.datasets.mini_world import WorldSplit, generate
from afm.datasets.rl_files import write_rl
from afm.datasets.sft_files import write_sft
from afm.errors import ConfigError, DataError
from afm.trajectory.record import Record
from afm.trajectory.tags import Author, Segment

TEXT = "<plan>P.</plan><think>T.</think><answer>\\boxed{7}</answer>"


@pytest.fixture
def spec():
    return load_agent("math")


def record(name="a", text=TEXT, **fields):
    return Record(
        id=name,
        agent=fields.pop("agent", "math"),
        agent_digest="d",
        question=f"{name}?",
        segments=(Segment(Author.AGENT, text),),
        **fields,
    )


def test_sft_rows_are_the_user_turn_and_the_whole_response(tmp_path, spec):
    source = tmp_path / "records.jsonl"
    source.write_bytes(b"abc")
    records = [record("ä"), record("b", kept=False), record("c")]

    assert write_sft(records, spec, tmp_path / "out", name="math_sft", inputs=[source]) == 2

    assert json.loads((tmp_path / "out" / "math_sft.json").read_text()) == [
        {"instruction": spec.user_message("ä?"), "input": "", "output": TEXT},
        {"instruction": spec.user_message("c?"), "input": "", "output": TEXT},
    ]
    assert json.loads((tmp_path / "out" / "dataset_info.json").read_text()) == {
        "math_sft": {
            "file_name": "math_sft.json",
            "columns": {"prompt": "instruction", "query": "input", "response": "output"},
        }
    }
    manifest = json.loads((tmp_path / "out" / "math_sft.manifest.json").read_text())
    assert manifest["counts"] == {"rows": 2}
    assert manifest["agent"]["digest"] == spec.digest
    assert manifest["inputs"] == {"records.jsonl": hashlib.sha256(b"abc").hexdigest()}


def test_other_datasets_stay_registered_and_a_broken_registry_is_not_overwritten(tmp_path, spec):
    (tmp_path / "dataset_info.json").write_text('{"old": {"file_name": "old.json"}}')
    write_sft([record()], spec, tmp_path, name="new")
    assert set(json.loads((tmp_path / "dataset_info.json").read_text())) == {"old", "new"}

    (tmp_path / "dataset_info.json").write_text("{")
    with pytest.raises(ConfigError, match=r"dataset_info\.json: invalid JSON"):
        write_sft([record()], spec, tmp_path, name="new")
    assert (tmp_path / "dataset_info.json").read_text() == "{"


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [record(agent="web")],
            "record 'a' belongs to agent 'web', expected 'math'; give --agent with the YAML of 'web'",
        ),
        (
            [record(text="<think>T.</think>", data_source="mini_math")],
            "record 'a' breaks the rules of agent 'math': .*To drop these rows: afm data filter FILE --output-dir DIR",
        ),
        (
            [record(text="<think>T.</think>")],
            "To drop these rows: afm data filter FILE --config configs/filters/logs.yaml --agent math --output-dir DIR",
        ),
        (
            [record(kept=False, reason="quality: wrong"), record(kept=False)],
            r"no trajectory was kept.*: all 2 rows have kept: false\. The first reason: quality: wrong",
        ),
        ([], "holds no trajectory to train on"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_and_leaves_nothing_behind(tmp_path, spec, records, message):
    with pytest.raises(DataError, match=message):
        write_sft(records, spec, tmp_path, name="x")

    assert list(tmp_path.iterdir()) == []


def test_rl_rows_have_the_published_layout(tmp_path, spec):
    task = Task(id="m-1", question="1+6?", ground_truth="7", data_source="mini_math", extra_info={"steps": 1})

    path = tmp_path / "rl.parquet"
    assert write_rl([task], spec, path, split="train") == {path: 1}

    (row,) = pq.read_table(path).to_pylist()
    arguments = {"ground_truth": "7", "question": "1+6?", "data_source": "mini_math"}
    assert row == {
        "data_source": "mini_math",
        "prompt": [{"role": "user", "content": spec.system_prompt() + "\n\nQuestion: 1+6?"}],
        "ability": "math",
        "reward_model": {"ground_truth": "7", "style": "rule"},
        "extra_info": {
            "steps": 1,
            "index": "m-1",
            "split": "train",
            "question": "1+6?",
            "answer": ["7"],
            "need_tools_kwargs": True,
            "tools_kwargs": {"code": {"create_kwargs": arguments}},
        },
    }


def test_rl_files_read_back_as_the_tasks_they_came_from(tmp_path, spec):
    tasks = list(generate(WorldSplit.RL, 2500, seed=0))

    write_rl(tasks, spec, tmp_path / "rl.parquet")
    back = list(read_tasks(tmp_path / "rl.parquet"))

    assert [(task.id, task.question, task.ground_truth) for task in back] == [
        (task.id, task.question, task.ground_truth) for task in tasks
    ]
    assert back[0].extra_info["expression"] == tasks[0].extra_info["expression"]
    manifest = json.loads((tmp_path / "rl.parquet.manifest.json").read_text())
    assert manifest["counts"] == {"rows": 2500}


def test_rows_of_different_kinds_share_one_file(tmp_path, spec):
    rows = [(["x", "y"], {"level": 1, "n": 1}), ({"stdin": ["1"]}, {"level": "hard", "n": 0.5})]
    rows += [("z", {"tags": ["k"], "index": "old"}), ({"target": ["ä"]}, {}), ({"target": "x"}, {})]
    tasks = [
        Task(id=name, question="q", ground_truth=gold, data_source="nq", extra_info=extra)
        for name, (gold, extra) in zip("abcde", rows, strict=True)
    ]
    write_rl(tasks, spec, tmp_path / "rl.parquet")

    rows = pq.read_table(tmp_path / "rl.parquet").to_pylist()
    golds = [row["reward_model"]["ground_truth"] for row in rows]
    assert golds[:3] == ['{"target": ["x", "y"]}', '{"stdin": ["1"]}', "z"]
    assert golds[3:] == ['{"target": ["ä"]}', '{"target": "x"}']
    keys = ("answer", "index", "level", "n", "tags")
    assert [tuple(row["extra_info"][key] for key in keys) for row in rows] == [
        (["x", "y"], "a", "1", 1.0, None),
        ([], "b", '"hard"', 0.5, None),
        (["z"], "c", None, None, '["k"]'),
        (["ä"], "d", None, None, None),
        (["x"], "e", None, None, None),
    ]


def test_an_agent_without_tools_needs_no_tool_arguments(tmp_path):
    plain = AgentSpec(name="plain", roles={"out": {"kind": "answer"}}, transitions={"start": ["out"]})
    write_rl([Task(id="a", question="q", ground_truth="1")], plain, tmp_path / "rl.parquet")

    (row,) = pq.read_table(tmp_path / "rl.parquet").to_pylist()
    assert row["extra_info"]["need_tools_kwargs"] is False
    assert "tools_kwargs" not in row["extra_info"]


def test_equal_ids_are_refused_since_their_samples_would_form_one_group(tmp_path, spec):
    task = Task(id="a", question="q", ground_truth="1")

    with pytest.raises(DataError, match="task id 'a' occurs twice"):
        write_rl([task, task], spec, tmp_path / "rl.parquet")
    with pytest.raises(DataError, match="no tasks to write"):
        write_rl([], spec, tmp_path / "rl.parquet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_tasks_are_streamed_into_row_groups_whatever_their_number(tmp_path, spec):
    """More rows take no more memory, and the first row has the last row's column."""

    def tasks(count):
        for number in range(count):
            extra = {"last": True} if number == count - 1 else {}
            question = f"{number} " + "x" * 1_000
            yield Task(id=f"t{number}", question=question, ground_truth="7", extra_info=extra)

    def peak(count):
        tracemalloc.start()
        path = tmp_path / f"{count}.parquet"
        assert write_rl(tasks(count), spec, path) == {path: count}
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(1)  # loads what it needs
    few, many = peak(2_000), peak(4_000)
    assert many < 1.1 * few
    file = pq.ParquetFile(tmp_path / "4000.parquet")
    assert [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)] == [1_000] * 4
    last = file.read(columns=["extra_info.last"]).to_pylist()
    assert [row["extra_info"]["last"] for row in (last[0], last[-1])] == [None, True]
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".parquet"}
