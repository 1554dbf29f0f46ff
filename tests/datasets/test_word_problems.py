"""SVAMP and GSM8K: questions, programs and splits, on small rows worked out by hand and on the published files."""

import hashlib
import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from extras import needs

from afm.datasets import read_tasks
from afm.datasets.hub_sets import read_hub_sets
from afm.datasets.readers import READERS
from afm.datasets.readers.word_problems import read_gsm8k, read_svamp
from afm.datasets.row_files import published_rows
from afm.errors import DataError
from afm.evaluation.config import load_config
from afm.evaluation.job import load_tasks

ROOT = Path(__file__).parents[2]
BOOKS = {
    "Question": "bryan 's books cost $ number1 each . if he buys number0 books and number0 maps , how much is that ?",
    "Numbers": "3.0 2.5",
    "Equation": "* + number0 number0 number1",
    "Answer": "15.0",
}


def test_a_row_of_svamp_has_its_numbers_its_sentences_and_its_program():
    task = read_svamp(BOOKS, "svamp-1")
    assert task.question == "Bryan's books cost $2.5 each. If he buys 3 books and 3 maps, how much is that?"
    assert (task.id, task.ground_truth) == ("svamp-1", "15")
    assert task.extra_info == {"program": "print((3+3)*2.5)", "steps": 2}


@pytest.mark.parametrize(
    ("equation", "answer", "program"),
    [
        ("- number0 - number1 1.0", "1.5", "print(3-(2.5-1))"),
        ("/ number0 / number1 number1", "3.0", "print(3/(2.5/2.5))"),
        ("+ * number0 number1 number0", "10.5", "print(3*2.5+3)"),
        ("* number0 0.1", "0.3", "print(round(3*0.1, 1))"),  # 0.30000000000000004
        ("/ number1 number0", "0.83", "print(round(2.5/3, 2))"),
        ("+ number0 number1", "9.0", "print(3+2.5)"),  # wrong: the team's filter drops it
    ],
)
def test_a_prefix_equation_becomes_a_program(equation, answer, program):
    task = read_svamp(BOOKS | {"Equation": equation, "Answer": answer}, "x")
    assert task.extra_info["program"] == program


@pytest.mark.parametrize(
    ("equation", "answer", "slip"),
    [
        ("- number0 - number1 1.0", "1.5", "print(2.5-1-3)"),  # negative
        ("* - number0 number1 2.0", "1.0", "print((2.5-3)*2)"),
        ("/ number0 / number1 number1", "3.0", "print(2.5/2.5/3)"),  # a fraction in place of a whole number
        ("- number1 / number0 2.0", "1.0", "print(3/2-2.5)"),
        ("- * number0 2.0 number0", "3.0", "print(3-3*2)"),
        ("- number1 number0", "-0.5", None),  # 0.5 does not look wrong
        ("/ number0 number1", "1.2", None),  # and neither does 0.833
        ("- number0 number0", "0.0", None),
        ("/ - number0 number0 number1", "0.0", None),  # one cannot be run
        ("+ number0 number1", "5.5", None),
    ],
)
def test_a_slip_is_the_program_with_two_numbers_reversed_if_that_can_be_seen(equation, answer, slip):
    task = read_svamp(BOOKS | {"Equation": equation, "Answer": answer}, "x")
    assert task.extra_info.get("slip") == slip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Numbers": "3.0"}, "`Question`: number1 is not among the 1 of `Numbers`"),
        ({"Numbers": "3.0 many"}, "`Numbers`: expected a number, got 'many'"),
        ({"Equation": "* number0"}, "`Equation`: expected a number, got ''"),
        ({"Equation": "number0 number1"}, "`Equation`: 'number1' is left over in 'number0 number1'"),
        ({"Answer": None}, "`Answer`: expected a number, got None"),
    ],
)
def test_a_broken_row_of_svamp_is_refused_with_the_field(change, message):
    with pytest.raises(DataError, match=re.escape(message)):
        read_svamp(BOOKS | change, "x")


def test_the_test_questions_are_read_as_text_without_their_equation():
    row = {
        "ID": "chal-1",
        "Body": "A pack costs 76 dollars. If there is a discount of 25 dollars on each pack",
    }
    row |= {
        "Question": "How much is a pack?",
        "Equation": "( 76.0 - 25.0 )",
        "Answer": 51.0,
        "Type": "Subtraction",
    }
    task = read_svamp(row, "x")
    assert task.question == (
        "A pack costs 76 dollars. If there is a discount of 25 dollars on each pack, how much is a pack?"
    )
    assert (task.id, task.ground_truth) == ("chal-1", "51")
    assert task.extra_info == {"steps": 1, "type": "Subtraction"}


def test_calculations_of_gsm8k_become_lines_with_names():
    solution = (
        "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nShe sold 48+24 = <<48+24=72>>72 clips altogether.\n"
        "She kept 10% of $72, so $<<10%*72=7.2>>7.20.\nThat class has $<<72-7.2=64.8>>64.80 class.\n#### 64.8"
    )
    task = read_gsm8k({"question": "How much?", "answer": solution}, "g-1")
    assert task.extra_info["program"].splitlines() == [
        "clips_may = 48/2",
        "clips_altogether = 48+clips_may",
        "result = (10/100)*clips_altogether",
        "class_2 = clips_altogether-result",
        "print(class_2)",
    ]
    assert (task.ground_truth, task.extra_info["steps"]) == ("64.8", 4)


@pytest.mark.parametrize(
    "calculation", ["<<x+1=3>>", "<<2*(3=6>>", "<<1/0=0>>", "<<__import__('os')=1>>", "no sign"]
)
def test_what_is_no_arithmetic_gives_no_program(calculation):
    task = read_gsm8k({"question": "How many?", "answer": f"So {calculation}6.\n#### 6"}, "x")
    assert "program" not in task.extra_info
    assert task.ground_truth == "6"


def printed(program):
    with redirect_stdout(io.StringIO()) as out:
        exec(program, {})
    return float(out.getvalue())


def published(shared, name):
    """The files of a list, as the repository has them, once their checksums are the list's."""
    [hub_set] = read_hub_sets(ROOT / f"configs/data/{name}.yaml").sets.values()
    files = {file.name: shared(f"data/{name}/{Path(file.name).name}").read_bytes() for file in hub_set.pinned}
    for file in hub_set.pinned:
        assert (len(files[file.name]), hashlib.sha256(files[file.name]).hexdigest()) == (
            file.size,
            file.checksum,
        )
    return hub_set, files


def without_numbers(rows):
    return {re.sub(r"\d+(?:[.,]\d+)*", "0", row.question.lower()) for row in rows}


@pytest.mark.parametrize(
    ("name", "rows", "usable", "tested"), [("svamp", 3138, 3130, 1000), ("gsm8k", 7473, 6993, 1319)]
)
def test_the_published_files_are_fetched_split_and_have_their_programs(
    name, rows, usable, tested, shared, hub, said, monkeypatch, tmp_path
):
    needs("huggingface_hub")
    hub_set, files = published(shared, name)
    place = f"{hub_set.repository}/{hub_set.revision}"
    hub.github = {f"{place}/{file}": content for file, content in files.items()}
    monkeypatch.setenv("GITHUB_RAW_ENDPOINT", f"http://127.0.0.1:{hub.port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    raw, out = tmp_path / "raw", tmp_path / "out"
    said("data", "download", name, "--output-dir", raw)
    output = said("data", "prepare", "published", name, "--data", raw, "--output-dir", out)
    assert "warning" not in output
    assert not list(out.rglob("*.bad_rows.jsonl"))

    train, val, test = (
        list(read_tasks(out / file))
        for file in ("tasks/train.jsonl", "tasks/val.jsonl", f"eval/{name}.jsonl")
    )
    assert (len(train) + len(val), len(test)) == (rows, tested)
    programs = [(task.extra_info.get("program"), float(task.ground_truth)) for task in [*train, *val]]
    right = [program for program, gold in programs if program and abs(printed(program) - gold) < 1e-9]
    assert len(right) == usable
    texts = [without_numbers(part) for part in (train, val, test)]
    assert len(texts[1]) == 200
    assert not texts[0] & texts[1] | (texts[0] | texts[1]) & texts[2]
    assert not any(re.search(r"number\d", task.question) for task in [*train, *val])
    if name == "gsm8k":
        short = list(read_tasks(out / "tasks/short.jsonl"))
        assert {task.extra_info["steps"] for task in short} == {1, 2}
        assert not without_numbers(short) & texts[1]
    file = next(path for path in raw.rglob("*") if path.name in ("SVAMP.json", "test.jsonl"))
    overrides = ["model=m", f"data={file}", f"output_dir={tmp_path}"]
    asked = load_tasks(load_config(ROOT / f"configs/eval/{name}.yaml", overrides))
    assert [task.question for task in asked] == [task.question for task in test]


@pytest.mark.slow
@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("name", "kept", "dropped"), [("svamp", 100, {}), ("gsm8k", 91, {"quality": 7, "team declined": 2})]
)
def test_a_hundred_published_rows_become_trajectories_by_running_them(
    name, kept, dropped, shared, said, tmp_path
):
    file = shared(f"data/{name}/{'train.csv' if name == 'svamp' else 'train.jsonl'}")
    tasks = [READERS[name].read(row, f"{name}-{number}") for number, row in published_rows(file)][:100]
    (tmp_path / "tasks.jsonl").write_text("".join(task.model_dump_json() + "\n" for task in tasks))
    agent = ROOT / "configs/tiny/agents/math.yaml"
    said("data", "distill", tmp_path / "tasks.jsonl", "--agent", agent, "--output-dir", tmp_path / "out")
    summary = json.loads((tmp_path / "out/manifest.json").read_text())
    assert (summary["counts"]["kept"], summary["dropped"]) == (kept, dropped)
