import json
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from afm.datasets import Task, read_task_files, read_tasks, scan_tasks, write_tasks
from afm.datasets.schema import question_of_prompt
from afm.errors import DataError


def write_lines(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def parquet_row(prompt="Task:\nAdd.", gold="3", **info):
    return {
        "data_source": "aime24",
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"ground_truth": gold, "style": "rule"},
        "extra_info": {"index": "0", **info},
    }


def write_parquet(path, *rows):
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def test_raw_qa_rows_keep_lists_of_answers_and_get_ids_by_line(tmp_path):
    many = {"question": "who?", "answer": ["A", "B"], "data_source": "nq"}
    file = write_lines(tmp_path / "qa.jsonl", many, "\n", {"question": "when?", "ground_truth": 1990})

    assert list(read_tasks(file, data_source="given")) == [
        Task(id="qa-1", question="who?", ground_truth=["A", "B"], data_source="nq"),
        Task(id="qa-3", question="when?", ground_truth="1990", data_source="given"),
    ]


def test_our_own_rows_come_back_unchanged(tmp_path):
    tasks = [
        Task(id="a", question="q", ground_truth={"target": ["x"]}, data_source="s", extra_info={"steps": 2}),
        Task(id="b", question="r\nZeile ü", ground_truth=["x", "y"], data_source="s"),
    ]

    assert write_tasks(tasks, tmp_path / "own.jsonl") == 2
    assert list(read_tasks(tmp_path / "own.jsonl")) == tasks


def test_published_parquet_rows_give_question_source_and_index(tmp_path):
    prompt = "Rules.\n\nTask:\nAdd 1\nand 2."
    stored = parquet_row("Task: shown", question="stored", index="1")
    file = write_parquet(tmp_path / "aime.parquet", parquet_row(prompt, split="test"), stored)
    task, other = read_tasks(file)

    assert task == Task(
        id="0",
        question="Add 1\nand 2.",
        ground_truth="3",
        data_source="aime24",
        extra_info={"index": "0", "split": "test"},
        ability="math",
        prompt=({"role": "user", "content": prompt},),
    )
    assert other.question == "stored"


@pytest.mark.parametrize(
    ("gold", "expected"),
    [
        ("204", "204"),
        ("[1, 2]", "[1, 2]"),
        ("{1, 2}", "{1, 2}"),
        ('{"target": ["a"], "question": "q"}', {"target": ["a"], "question": "q"}),
        ({"target": ["a"], "absent": None}, {"target": ["a"]}),
    ],
)
def test_ground_truth_as_plain_text_json_object_or_mapping(tmp_path, gold, expected):
    file = write_lines(tmp_path / "a.jsonl", parquet_row(gold=gold))

    assert next(iter(read_tasks(file))).ground_truth == expected


@pytest.mark.parametrize(
    ("prompt", "question"),
    [
        ("Rules\n\nTask:\nDo it.", "Do it."),
        ("Rules\n\nTask: Do it.\nNow.", "Do it.\nNow."),
        ("Rules\n\nQuestion: who?", "who?"),
        ("Task: an example\nTask: the real one", "the real one"),
        ("The Task: is not a line of its own", "The Task: is not a line of its own"),
        ("no mark at all", "no mark at all"),
    ],
)
def test_the_question_stands_behind_the_last_mark(prompt, question):
    assert question_of_prompt(prompt) == question


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json\n", "invalid JSON"),
        ("[1]\n", "expected a JSON object, got list"),
        ({"answer": "1"}, "expected `question`"),
        ({"question": " ", "answer": "1"}, "expected `question`"),
        ({"question": "q"}, "expected `answer`"),
        ({"question": "q", "answer": "1", "data_source": 3}, "`data_source`: expected a string"),
        ({"question": "q", "answer": "1", "extra_info": "x"}, "`extra_info`: expected a mapping, got text"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "`prompt`: expected"),
        ({"question": "q", "answer": "1", "id": "good-1"}, "'good-1' was used by an earlier row"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line_and_the_others_are_kept(tmp_path, row, message):
    good = [{"id": f"good-{number}", "question": "q", "answer": "1"} for number in (1, 2)]
    file = write_lines(tmp_path / "rows.jsonl", good[0], row, good[1])

    first, error, last = scan_tasks(file)

    assert (first.id, last.id) == ("good-1", "good-2")
    assert str(error).startswith(f"{file}:2: ")
    assert message in str(error)
    with pytest.raises(DataError, match=r"rows\.jsonl:2: "):
        list(read_tasks(file))


def test_files_that_are_broken_or_missing_are_errors_and_rows_are_counted_from_one(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"question": "\xff", "answer": "1"}\n')
    (error,) = scan_tasks(tmp_path / "rows.jsonl")
    assert (type(error), error.line) == (DataError, 1)
    rows = parquet_row(), parquet_row() | {"prompt": None}
    _, error = scan_tasks(write_parquet(tmp_path / "a.parquet", *rows))
    assert error.line == 2
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match="not a readable parquet file"):
        list(read_tasks(tmp_path / "a.parquet"))
    with pytest.raises(DataError, match="no such file"):
        list(read_tasks(tmp_path / "b.jsonl"))


@pytest.mark.parametrize(
    ("name", "count", "gold", "begin"),
    [
        ("aime24", 30, "204", "Every morning Aya goes for a $9$-kilometer-long walk"),
        ("amc23", 40, "27.0", "Cities $A$ and $B$ are $45$ miles apart."),
        ("math500", 500, "\\left( 3, \\frac{\\pi}{2} \\right)", "Convert the point $(0,3)$ in rectangular"),
    ],
)
def test_real_math_rows(name, count, gold, begin, shared):
    file = shared(f"data/code_math/{name}.parquet")

    tasks = list(read_tasks(file))

    assert len(tasks) == count
    assert tasks[0].ground_truth == gold
    assert tasks[0].question.startswith(begin)
    assert all(isinstance(task.ground_truth, str) for task in tasks)
    assert not any("special tokens" in task.question for task in tasks)


def test_real_code_rows_carry_their_tests_as_a_mapping_and_real_questions_their_answers(shared):
    file = shared("data/code_math/livecodebench_v4.parquet")

    tasks = list(read_tasks(file))

    assert len(tasks) == 100
    assert tasks[0].id == "abc366_f"
    assert tasks[0].question.startswith("You are given N linear functions f_1, f_2,")
    assert set(tasks[0].ground_truth) == {"stdin", "expected_output", "question_id"}
    assert tasks[0].extra_info["starter_code"] == ""

    tasks = list(read_tasks(shared("data/qa/nq_full.jsonl")))
    assert (len(tasks), tasks[0].ground_truth) == (3610, ["Wilhelm Conrad Röntgen"])
    assert tasks[0].data_source == "nq"


def test_an_id_of_nought_is_an_id(tmp_path):
    """Published rows are counted from 0."""
    qa = {"question": "who?", "answer": "A"}
    rows = {**qa, "id": 0}, {**qa, "id": None}, {**qa, "extra_info": {"index": 0}, "id": ""}
    first, second, repeated = scan_tasks(write_lines(tmp_path / "n1.jsonl", *rows))
    assert (first.id, second.id) == ("0", "n1-2")
    assert str(repeated).endswith("n1.jsonl:3: id '0' was used by an earlier row; ids must be unique")


def test_an_id_that_two_files_have_is_told_with_both(tmp_path):
    qa = {"question": "who?", "answer": "A"}
    first = write_lines(tmp_path / "n1.jsonl", {**qa, "id": 0}, {**qa, "id": 1})
    second = write_lines(tmp_path / "n2.jsonl", {**qa, "id": "2"}, {**qa, "id": "1"})

    fault = r"n2\.jsonl:2: task id '1' is at .*n1\.jsonl:2 too; ids must be unique over all files"
    with pytest.raises(DataError, match=fault):
        list(read_task_files([first, second]))
    assert [task.id for task in read_task_files([first])] == ["0", "1"]


ASKED = [("Wie groß ist Köln, in km²?", "405")]


@pytest.mark.parametrize(
    ("encoding", "separator"), [("utf-8", ","), ("utf-8-sig", ";"), ("utf-16", "\t"), ("utf-8", ";")]
)
def test_a_table_is_read_as_spreadsheets_of_any_country_save_it(tmp_path, encoding, separator):
    lines = [("question", "answer"), *((f'"{question}"', answer) for question, answer in ASKED)]
    file = tmp_path / "mine.csv"
    file.write_bytes("".join(separator.join(line) + "\r\n" for line in lines).encode(encoding))
    assert [(task.question, task.ground_truth) for task in read_tasks(file)] == ASKED


def test_a_table_that_is_not_utf8_names_the_line_and_the_way_out(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_bytes("question,answer\nWho?,me\nKöln?,yes\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"mine\.csv:3: not UTF-8 ") as caught:
        list(read_tasks(file))
    subprocess.run(caught.value.message.rpartition(": ")[2], shell=True, check=True)  # typed as it stands
    assert [task.question for task in read_tasks(tmp_path / "mine_utf8.csv")] == ["Who?", "Köln?"]


def test_an_empty_answer_and_other_columns_are_bad_rows(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("question,answer\nWho?, \n")
    with pytest.raises(DataError, match=r"mine\.csv:2: the answer is empty"):
        list(read_tasks(file))
    file.write_text("Frage,Antwort\nWer?,ich\n")
    with pytest.raises(DataError, match=r"got the columns 'Frage', 'Antwort'; .*--question-key"):
        list(read_tasks(file))
