"""Readers of published layouts, on small files in the format of the original, parquet included."""

import base64
import json
import pickle
import zlib
from functools import partial
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from afm.agents import load_agent
from afm.choices import GoldForm
from afm.configuration import read_file
from afm.datasets import Task, read_tasks, write_tasks
from afm.datasets.hub_sets import Preparation, Product, read_hub_sets
from afm.datasets.prepared import make
from afm.datasets.published import BadRows, ReadCounts, read_published
from afm.datasets.readers import READERS
from afm.datasets.rl_files import write_rl
from afm.datasets.row_files import published_rows
from afm.errors import DataError
from afm.evaluation.job import read_benchmark
from afm.rewards import Sample, load_reward
from afm.rewards.code_tests.problem import read_problem
from afm.rewards.registry import BY_SOURCE, scorer_name
from afm.trajectory.record import SEALING_KEY
from afm.trajectory.tags import Author, Segment

SAMPLES = Path(__file__).parent / "samples"
ROOT = Path(__file__).parents[2]
TEXT_FILES = {
    *("musique_ans_v1.0_dev", "popqa_test", "flashrag_nq_test", "livecodebench_test", "math500"),
    *("agent_flan", "afm_sft", "afm_rl"),
}
"""Sets whose originals are no parquet files."""


def packed(cases):
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


@pytest.fixture
def sample(tmp_path):
    """The file of a sample, in the format of its original."""

    def find(name):
        source = SAMPLES / name
        if source.stem not in TEXT_FILES:
            rows = [json.loads(line) for line in source.read_text().splitlines()]
            path = tmp_path / f"{source.stem}.parquet"
            pq.write_table(pa.Table.from_pylist(rows), path)
            return path
        path = tmp_path / source.name
        private = packed([{"input": "5\n", "output": "10\n", "testtype": "stdin"}])
        path.write_text(source.read_text().replace('"PACKED"', json.dumps(private)))
        return path

    return find


def read(path, reader, tmp_path, **options):
    """Return the rows that a reader makes of a file, and the refused rows as (line, reason)."""
    counts = ReadCounts()
    with (tmp_path / "bad").open("w+") as file:
        options = {"label": "set"} | options
        made = list(read_published([path], READERS[reader], BadRows(file), counts, **options))
        file.seek(0)
        bad = [json.loads(line) for line in file]
    assert counts.read == counts.made + counts.repeated + counts.bad
    assert (counts.made, counts.bad) == (len(made), len(bad))
    assert all(row["file"] == str(path) for row in bad)
    return made, [(row["line"], row["reason"]) for row in bad], counts


QA = [
    ("nq_open.jsonl", "nq", "set-1", "who built it", ["Ines Marr", "I. Marr"]),
    ("trivia_qa.jsonl", "triviaqa", "tc_7", "Which river?", ["Orr", "River Orr", "Orr (river)"]),
    ("hotpot_qa.jsonl", "hotpotqa", "5a7a0693", "In which town?", ["Veld"]),
    ("2wiki.jsonl", "2wikimultihopqa", "13f5ad2c", "Who is her mother?", ["Oda Marr"]),
    ("musique_ans_v1.0_dev.jsonl", "musique", "2hop__1_2", "On which river?", ["Orr", "River Orr"]),
    ("bamboogle.jsonl", "bamboogle", "set-1", "Who ruled?", ["Queen Sel"]),
    ("popqa_test.tsv", "popqa", "4222362", "What is her job?", ["architect", "builder"]),
    ("flashrag_nq_test.jsonl", "flashrag", "set-1", "who wrote it", ["Sel Orr"]),
]
EXTRA = {
    "triviaqa": {"question_source": "http://quiz.example/"},
    "hotpotqa": {"type": "bridge", "level": "medium"},
    "2wikimultihopqa": {"type": "compositional"},
    "musique": {"hops": 2},
    "popqa": {"prop": "occupation"},
    "flashrag": {"published_id": "test_0"},
}
NO_ANSWER, NO_QUESTION = "`answer`: expected at least one answer", "`question`: expected a text"
REFUSED = {
    "nq": {2: NO_QUESTION, 3: f"{NO_ANSWER}, got []"},
    "triviaqa": {2: NO_ANSWER},
    "hotpotqa": {2: f"{NO_ANSWER}, got None"},
    "2wikimultihopqa": {2: NO_QUESTION},
    "musique": {2: "`answerable` is false"},
    "bamboogle": {2: "`Answer`: expected at least one answer, got None"},
    "popqa": {3: "`possible_answers`: expected a JSON list, got 'poet'", 4: "expected 17 fields, as in"},
    "flashrag": {2: "`golden_answers`: expected at least one answer, got []"},
}
"""Reasons for which rows of these samples are refused, by line."""


@pytest.mark.parametrize(("name", "reader", "identity", "question", "gold"), QA)
def test_question_sets(name, reader, identity, question, gold, sample, tmp_path):
    source, extra = READERS[reader].data_source or "nq", EXTRA.get(reader, {})
    [task], bad, _ = read(sample(name), reader, tmp_path, data_source=source)
    expected = {"id": identity, "question": question, "ground_truth": gold, "extra_info": extra}
    assert task == Task(data_source=source, **expected)
    assert [line for line, _ in bad] == list(REFUSED[reader])
    assert all(REFUSED[reader][line] in reason for line, reason in bad)


def test_livecodebench_keeps_packed_tests_and_names_the_function(sample, tmp_path):
    made, bad, _ = read(sample("livecodebench_test.jsonl"), "livecodebench", tmp_path)
    printing, function = made
    assert (printing.id, printing.data_source) == ("abc900_a", "livecodebench")
    assert printing.question.startswith("Print twice the number.\n\nThe program reads standard input")
    assert printing.extra_info["contest_date"] == "2023-08-21T00:00:00"
    problem = read_problem(printing.ground_truth, printing.extra_info)
    assert [(case.stdin, case.expected) for case in problem.printing] == [("2\n", "4\n"), ("5\n", "10\n")]
    assert "Complete this code:\n```py\nclass Solution:" in function.question
    assert read_problem(function.ground_truth, function.extra_info).function == "twice"
    [(line, message)] = bad
    assert line == 3
    assert message.startswith("tests: packed tests: neither base64 nor zlib")


def test_codecontests_and_codeforces(sample, tmp_path):
    [task], bad, _ = read(sample("code_contests.jsonl"), "codecontests", tmp_path)
    assert (task.id, task.data_source) == ("1_A. Twice", "codecontests")
    assert task.extra_info == {"time_limit_s": 1.5, "source": 2, "difficulty": 7, "cf_rating": 800}
    cases = read_problem(task.ground_truth).printing
    assert [(case.stdin, case.expected) for case in cases] == [("2\n", "4\n"), ("3\n", "6\n")]
    assert "solutions" not in task.model_dump_json()
    assert [line for line, _ in bad] == [2, 3]
    assert "`input_file` is 'in.txt'" in bad[0][1]
    assert bad[1][1].startswith("tests: the row has no tests")

    [task], bad, _ = read(sample("codeforces.jsonl"), "codeforces", tmp_path)
    assert task.question == (
        "Print the numbers in any order.\n\nInput\nOne line of numbers.\n\nOutput\nThe numbers.\n\n"
        "Examples\nInput:\n1 2\nOutput:\n2 1\n\n"
        "The program reads standard input and writes its answer to standard output."
    )
    assert read_problem(task.ground_truth).checker == "import sys\nprint(1)\n"
    assert [line for line, _ in bad] == [2, 3, 4]
    assert ["interactive" in bad[0][1], "truncated" in bad[1][1], "'file'" in bad[2][1]] == [True] * 3


def test_skywork_tells_mathematics_from_programs(sample, tmp_path):
    [task], bad, _ = read(sample("skywork_math.jsonl"), "skywork_or1", tmp_path)
    assert task == Task(
        id="train-math-deepscaler-0",
        question="What is $1+6$?",
        ground_truth=["7"],
        data_source="skywork_math",
        extra_info={
            "published_source": "train-math-deepscaler",
            "model_difficulty": {"DeepSeek-R1-Distill-Qwen-7B": 3},
        },
    )
    assert [line for line, _ in bad] == [2]

    [taco, leetcode], bad, _ = read(sample("skywork_code.jsonl"), "skywork_or1", tmp_path)
    assert (taco.id, taco.data_source) == ("train-code-taco-easy-0", "skywork_livecodebench_taco")
    assert read_problem(taco.ground_truth).printing[0].expected == "4\n"
    assert leetcode.data_source == "skywork_livecodebench_leetcode"
    assert read_problem(leetcode.ground_truth).tests.endswith("check(Solution().twice)")
    assert "expected JSON with tests" in bad[0][1]


BENCHMARKS = [
    ("math500.jsonl", "math_problem", ("test/algebra/1.json", "What is $1+6$?", "7"), []),
    ("aime_2024.jsonl", "math_problem", ("2024-I-1", "What is $1+6$?", "7"), ["expected an answer"]),
    ("amc23.jsonl", "math_problem", ("0", "What is $1+6$?", "7"), []),
    ("olympiadbench.jsonl", "math_problem", ("1606", "Which two?", "$1$, $2$"), []),
    ("gaia_metadata.jsonl", "gaia", ("e1fc63a2", "How far?", ["17"]), ["about a file"]),
    ("hle.jsonl", "hle", ("66e8", "Which?", ["B"]), ["about an image"]),
]


@pytest.mark.parametrize(("name", "reader", "expected", "refused"), BENCHMARKS)
def test_benchmarks(name, reader, expected, refused, sample, tmp_path):
    [task], bad, _ = read(sample(name), reader, tmp_path, data_source="aime24")
    assert (task.id, task.question, task.ground_truth) == expected
    assert task.data_source == (READERS[reader].data_source or "aime24")
    assert len(bad) == len(refused)
    assert all(wanted in message for (_, message), wanted in zip(bad, refused, strict=True))


@pytest.mark.parametrize("reader", ["2wikimultihopqa", "musique", "bamboogle"])
def test_question_sets_of_simple_deep_searcher(reader, tmp_path):
    path = tmp_path / "set.json"
    row = {"Question": "Who is Orr's mother?", "source": "set", "id": "n_1", "answer": ["Oda", "Oda Marr"]}
    path.write_text(json.dumps([row, row | {"id": "x", "answer": []}]))
    [task], bad, _ = read(path, reader, tmp_path)
    assert (task.id, task.question, task.ground_truth) == ("n_1", "Who is Orr's mother?", ["Oda", "Oda Marr"])
    assert (task.data_source, task.extra_info) == (reader, {})
    assert [reason for _, reason in bad] == ["`answer`: expected at least one answer, got []"]


SOLUTION = "Almar has 1,000 + 200 = <<1000+200=1200>>1,200 boats.\nIt sells 18.\n#### "


@pytest.mark.parametrize(
    ("last", "gold"), [("18", "18"), ("1,182", "1182"), ("-3", "-3"), ("$2.50", "2.50"), ("18\n", "18")]
)
def test_gsm8k_is_asked_for_the_number_behind_its_solution(last, gold, tmp_path):
    path = tmp_path / "test.jsonl"
    row = {"question": "How many boats?", "answer": SOLUTION + last}
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"answer": "Many. #### 3 or 4"}) + "\n")
    [task], bad, _ = read(path, "gsm8k", tmp_path)
    assert (task.ground_truth, task.data_source) == (gold, "gsm8k")
    assert bad == [(2, "`answer`: expected a last line like '#### 18', got 'Many. #### 3 or 4'")]
    # Rows that name their source, or get it with the command, need no reader.
    assert next(read_tasks(path, data_source="gsm8k")).ground_truth == gold
    path.write_text(json.dumps(row | {"data_source": "openai/gsm8k"}))
    assert next(read_tasks(path)).ground_truth == gold
    assert next(read_tasks(path)).question == "How many boats?"


def test_another_source_keeps_its_text_with_number_signs(tmp_path):
    (tmp_path / "notes.jsonl").write_text(json.dumps({"question": "q", "answer": "Heading\n#### 4"}))
    assert next(read_tasks(tmp_path / "notes.jsonl", data_source="search")).ground_truth == "Heading\n#### 4"


@pytest.fixture
def prepare(said):
    return partial(said, "data", "prepare", "tasks")


@pytest.mark.parametrize("source", ["gsm8k", "math"])
def test_plain_rows_with_worked_solutions_are_asked_for_the_number_behind_them(source, prepare, tmp_path):
    (tmp_path / "mine.jsonl").write_text(json.dumps({"question": "q", "answer": SOLUTION + "1,182"}))
    prepare(tmp_path / "mine.jsonl", "-o", tmp_path / "tasks.jsonl", "--data-source", source)
    assert json.loads((tmp_path / "tasks.jsonl").read_text())["ground_truth"] == "1182"


async def test_right_answers_to_published_gsm8k_rows_score(shared):
    spec, reward = load_agent("math"), load_reward({"formula": "correct"})
    scores = []
    for task in islice(read_benchmark(shared("data/gsm8k/test.jsonl"), reader="gsm8k"), 150):
        said = (Segment(Author.AGENT, f"<answer>\\boxed{{{task.ground_truth}}}</answer>"),)
        sample = Sample(spec, task.data_source, task.question, said, task.ground_truth)
        scores.append((await reward.score(sample)).score)
    await reward.close()
    assert scores == [1.0] * 150


def test_what_is_published_encrypted_is_read_but_never_written(sample, tmp_path):
    [task], bad, _ = read(sample("browse_comp.jsonl"), "browsecomp", tmp_path)
    assert (task.id, task.question) == ("set-1", "Which tower stands in Almar, a town of a made-up land?")
    assert (task.ground_truth, task.data_source) == (["Lighthouse"], "browsecomp")
    assert SEALING_KEY in task.extra_info
    assert ["`problem` cannot be read with the row's `canary`" in message for _, message in bad] == [True]
    step, out = Preparation(reader="browsecomp", into=Product.TASKS), tmp_path / "out"
    for write in (
        lambda: make("browsecomp", step, [sample("browse_comp.jsonl")], out),
        lambda: write_tasks([task], out / "tasks.jsonl"),
        lambda: write_rl([task], load_agent("web"), out / "rl.parquet"),
    ):
        with pytest.raises(DataError, match="published encrypted and is not written in plain form"):
            write()
        assert list(out.glob("*")) == []
    with pytest.raises(DataError, match="reader=null"):
        READERS["browsecomp"].read({"problem": "Who?", "answer": "Ada"}, "x")


GAIA = {"task_id": "t1", "Question": " How many? ", "Level": "2", "Final answer": "17", "file_name": ""}
SHARED = {"id": 1, "task_id": "t1", "Level": 2}
OF_AFM = SHARED | {"question": "How many?", "answer": "17", "Annotator_Metadata": {}}
OF_SEARCHER = SHARED | {"Question": "How many?", "answer": ["17"], "source": "gaia"}


@pytest.mark.parametrize("row", [GAIA, OF_AFM, OF_SEARCHER], ids=["owner", "afm", "simple_deep_searcher"])
def test_gaia_is_read_as_each_of_three_publishes_it(row):
    task = Task(
        id="t1", question="How many?", ground_truth=["17"], data_source="gaia", extra_info={"level": "2"}
    )
    assert READERS["gaia"].read(row, "x") == task
    with pytest.raises(DataError, match="withheld"):
        READERS["gaia"].read(GAIA | {"Final answer": "?"}, "x")


def test_webwalker_keeps_level_domain_and_language():
    known = {"domain": "game", "lang": "en", "type": "multi_source"}
    info = known | {"Level": "hard", "golden_path": ["a->b"]}
    row = {"question": "q?", "answer": "a", "root_url": "https://example.org", "info": info}
    extra = known | {"level": "hard", "root_url": "https://example.org"}
    task = Task(id="x", question="q?", ground_truth="a", data_source="webwalker", extra_info=extra)
    assert READERS["webwalker"].read(row, "x") == task


def test_dapo_rows_lose_their_wrapping_and_their_repetitions(sample, tmp_path):
    [task], bad, counts = read(sample("dapo_math.jsonl"), "dapo_math", tmp_path)
    assert task == Task(
        id="9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079",
        question="What is $2+5$?\n\nGive an integer.",
        ground_truth="7",
        data_source="math_dapo",
    )
    assert (counts.read, counts.repeated, len(bad)) == (3, 1, 1)


def test_conversations_say_what_is_trained_on(sample, tmp_path):
    [retool], bad, _ = read(sample("retool_sft.jsonl"), "retool", tmp_path)
    roles = [(turn.role, turn.loss) for turn in retool.messages]
    assert roles == [("user", False), ("assistant", True), ("tool", False), ("assistant", True)]
    assert retool.messages[2].content == "42"
    assert retool.messages[1].content.endswith("print(6*7)\n```\n</code>")
    assert retool.messages[3].content.startswith("So it is 42.")
    assert "<interpreter> block is never closed" in bad[0][1]

    [flan], bad, _ = read(sample("agent_flan.jsonl"), "agent_flan", tmp_path)
    assert (flan.id, [turn.loss for turn in flan.messages]) == ("react_1", [False, False, True])
    assert "no turn has loss = true" in bad[0][1]


def test_an_index_that_stands_twice_becomes_unique(sample, tmp_path):
    made, bad, counts = read(sample("afm_rl.jsonl"), "afm_rl", tmp_path)
    assert [(task.id, task.question) for task in made] == [("1", "who?"), ("set-2", "where?")]
    assert made[0].ground_truth == {"target": ["a", "b"], "question": "who?"}
    assert counts.renamed == 1
    assert [line for line, _ in bad] == [3]


def test_alpaca_rows_and_their_entry(sample, tmp_path):
    step = Preparation(reader="afm_sft", into=Product.SFT)
    prepared = make("web_agent_sft", step, [sample("afm_sft.jsonl")], tmp_path / "out")
    row = {"instruction": "Rules.\n\nQuestion: who?", "input": "", "system": "Be brief."}
    assert json.loads(prepared.path.read_text()) == [row | {"output": "<think>T.</think><answer>a</answer>"}]
    info = json.loads((tmp_path / "out/dataset_info.json").read_text())["web_agent_sft"]
    assert info["columns"]["system"] == "system"
    assert [json.loads(line)["line"] for line in prepared.bad_rows.read_text().splitlines()] == [2]
    manifest = json.loads((tmp_path / "out/web_agent_sft.manifest.json").read_text())
    assert manifest["counts"] == {"read": 2, "made": 1, "repeated": 0, "bad": 1, "renamed": 0}


@pytest.mark.parametrize("path", sorted((ROOT / "configs/data").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_lists_name_data_sources_that_have_a_reward(path):
    for name, one in read_hub_sets(path).sets.items():
        for step in one.prepare:
            makes = READERS[step.reader]
            if step.into in (Product.TASKS, Product.RL) and step.reader not in ("afm_rl", "skywork_or1"):
                scorer_name(makes.data_source or step.data_source, BY_SOURCE)
            if step.into is Product.RL:
                assert load_agent(step.agent).tool_roles
            assert (step.into is Product.CHAT) == makes.makes_conversations, name


def test_the_keys_of_the_sft_sets_are_those_the_recipes_train_on():
    for agent in ("web", "mhqa", "code"):
        sets = read_file(ROOT / f"configs/data/{agent}_agent.yaml")["sets"]
        assert sets[f"{agent}_agent_sft"]["prepare"][0]["into"] == "sft"
        known = json.loads((ROOT / "data/dataset_info.json").read_text())
        assert known[f"{agent}_agent_sft"]["hf_hub_url"] == sets[f"{agent}_agent_sft"]["repository"]


def test_the_command_reads_one_file_and_counts_what_it_refuses(prepare, sample, tmp_path):
    popqa, out = sample("popqa_test.tsv"), tmp_path / "out/tasks.jsonl"
    printed = prepare(popqa, "--reader", "popqa", "-o", out)
    assert f"{out}: 1 of 3 rows" in printed
    assert "refused: 1 expected 17 fields, as in the first line" in printed
    strict = prepare(popqa, "--reader", "popqa", "-o", out, "--on-bad-rows", "error", status=1)
    assert "popqa_test.tsv:3: `possible_answers`" in strict
    assert [task.id for task in read_tasks(out)] == ["4222362"]
    assert "did you mean 'popqa'" in prepare(popqa, "--reader", "popga", "-o", out, status=2)
    assert "no row of" in prepare(popqa, "--reader", "nq", "-o", tmp_path / "none.jsonl", status=1)
    assert not (tmp_path / "none.jsonl").exists()
    prepare(sample("agent_flan.jsonl"), "--reader", "agent_flan", "-o", tmp_path / "chat.jsonl")
    assert json.loads((tmp_path / "chat.jsonl").read_text())["messages"][2]["loss"] is True


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "q", "answer": None}, "`answer`: expected an answer, got None"),
        ({"question": "q", "answer": " "}, "`answer`: expected an answer, got ' '"),
        ({"question": "q", "answer": ["", None]}, "`answer`: expected an answer, got ['', None]"),
        ({"question": 5, "answer": "x"}, "`question`: expected a text that is not empty, got 5"),
        (
            {"question": "q", "answers": "x"},
            "no value under 'answer'; did you mean 'answers'? (the row has answers, data_source, question)",
        ),
    ],
)
def test_plain_rows_without_question_or_answer_are_refused(row, reason, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(row | {"data_source": "nq"}) + "\n")
    assert read(path, "plain", tmp_path)[1] == [(1, reason)]


def test_plain_rows_are_read_by_the_keys_that_the_user_names(prepare, tmp_path):
    table, out = tmp_path / "mine.csv", tmp_path / "tasks.jsonl"
    table.write_text("nr,problem,solution\n1,What is 1+6?,7\n2,What is 2+2?,\n")
    words = ["--question-key", "problem", "--answer-key", "solution", "--data-source", "math500", "-o", out]
    assert "refused: 1 `solution`: expected an answer" in prepare(table, *words)
    [task] = read_tasks(out)
    assert task == Task(id="tasks-1", question="What is 1+6?", ground_truth="7", data_source="math500")
    misspelt = prepare(table, *words, "--answer-key", "solutions", status=1)
    assert "no value under 'solutions'; did you mean 'solution'?" in misspelt
    assert "reader 'gsm8k' knows its keys" in prepare(table, "--reader", "gsm8k", *words, status=2)
    (tmp_path / "mine.jsonl").write_text('{"problem": "What is 1+6?", "solution": "7"}\n')
    with pytest.raises(
        DataError,
        match=r"`afm data prepare tasks .*mine.jsonl --question-key problem --answer-key solution --out",
    ):
        list(read_tasks(tmp_path / "mine.jsonl"))


def test_what_is_not_downloaded_is_told_before_anything_is_made(said, sample, tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    (data / "mhqa_agent_sft").mkdir(parents=True)
    sample("afm_sft.jsonl").rename(data / "mhqa_agent_sft/rows.jsonl")

    words = ("data", "prepare", "published", "mhqa_agent", "--data", data, "--output-dir", out)
    made = partial(said, *words, "--only", "mhqa_agent_sft", "--only", "mhqa_agent_rl")
    assert "`afm data download` fetches set 'mhqa_agent_rl'" in made(status=1)
    assert not out.exists()
    (data / "mhqa_agent_rl/data").mkdir(parents=True)
    sample("afm_rl.jsonl").rename(data / "mhqa_agent_rl/data/rl.jsonl")
    assert "rl/train: 1 file by reader afm_rl, made into rl" in made("--dry-run")
    assert not out.exists()
    message = made()
    assert f"{out}/rl/train.parquet, {out}/rl/val.parquet: 2 of 3 rows" in message
    assert "warning: 3 rows, 169,615 were published" in message
    assert "renamed: 1 share an id with another row" in message
    names = [task.id for part in ("train", "val") for task in read_tasks(out / f"rl/{part}.parquet")]
    assert sorted(names) == ["1", "mhqa_agent_rl-2"]


def test_files_that_are_no_tables_at_all_are_errors(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"a\.txt: expected one of \.parquet, \.jsonl"):
        list(published_rows(tmp_path / "a.txt"))
    with pytest.raises(DataError, match="no such file"):
        list(published_rows(tmp_path / "b.jsonl"))
    for name in ("q.xlsx", "renamed.csv"):
        (tmp_path / name).write_bytes(b"PK\x03\x04\x14\0")
        with pytest.raises(
            DataError, match=rf"{name}:1: got a spreadsheet .* libreoffice --convert-to csv .*/{name}$"
        ):
            list(published_rows(tmp_path / name))
    (tmp_path / "c.jsonl").write_text('{"question": "q", "answer": ["a"]}\n{broken\n[1]\n')
    [_], bad, _ = read(tmp_path / "c.jsonl", "nq", tmp_path)
    assert [line for line, _ in bad] == [2, 3]


@pytest.mark.parametrize("form", list(GoldForm))
async def test_rewards_read_the_ground_truth_in_every_form(form, tmp_path):
    spec, reward = load_agent("mhqa"), load_reward()
    task = Task(id="t", question="who?", ground_truth=["Ines Marr", "I. Marr"], data_source="nq")
    write_rl([task], spec, tmp_path / "rl.parquet", gold=form, ability="qa")

    [row] = pq.read_table(tmp_path / "rl.parquet").to_pylist()
    stored = row["reward_model"]["ground_truth"]
    question = {"question": "who?"} if form is GoldForm.QUESTION else {}
    gold = json.loads(stored) if isinstance(stored, str) else stored
    assert gold == {"target": ["Ines Marr", "I. Marr"]} | question
    assert isinstance(stored, dict) == (form is GoldForm.TARGET)
    assert row["extra_info"]["tools_kwargs"]["wiki_search"]["create_kwargs"]["ground_truth"] == stored
    [back] = read_tasks(tmp_path / "rl.parquet")
    text = "<think>T.</think>\n<plan>P.</plan>\n<think>T.</think>\n<answer>{}</answer>"
    for gold in (stored, back.ground_truth):
        for answer, score in (("I. Marr", 1.0), ("Oda Marr", 0.0)):
            sample = Sample(spec, "nq", "who?", (Segment(Author.AGENT, text.format(answer)),), gold)
            assert (await reward.score(sample)).parts["correct"] == score
    await reward.close()


@pytest.mark.parametrize(
    ("agent", "stored"), [("mhqa", '{"target": ["1359"], "question": "when?"}'), ("math", "1359")]
)
def test_the_usual_form_is_that_of_the_published_rows(agent, stored, tmp_path):
    task = Task(id="t", question="when?", ground_truth="1359", data_source="nq")
    write_rl([task], load_agent(agent), tmp_path / "rl.parquet")

    [row] = pq.read_table(tmp_path / "rl.parquet").to_pylist()
    assert row["reward_model"]["ground_truth"] == stored


def test_a_form_that_needs_answers_refuses_tests(tmp_path):
    task = Task(id="t", question="q", ground_truth={"inputs": ["1"], "outputs": ["2"]})
    with pytest.raises(DataError, match="task 't' has no answers for the ground truth form 'target'"):
        write_rl([task], load_agent("code"), tmp_path / "rl.parquet", gold=GoldForm.TARGET)


def test_a_published_row_without_answers_for_the_form_is_located(sample, tmp_path):
    step = Preparation(
        reader="livecodebench", into=Product.RL, agent="code", ability="coding", ground_truth=GoldForm.TARGET
    )
    file = sample("livecodebench_test.jsonl")
    with pytest.raises(DataError, match="has no answers for the ground truth form") as caught:
        make("lcb", step, [file], tmp_path / "out")
    assert str(caught.value).startswith(f"{file}:1: task ")


def test_prepared_code_rows_hold_tests_that_the_reward_reads(sample, tmp_path):
    step = Preparation(reader="livecodebench", into=Product.RL, agent="code", ability="coding")
    prepared = make("lcb", step, [sample("livecodebench_test.jsonl")], tmp_path / "out")
    first, second = pq.read_table(prepared.path).to_pylist()
    assert (first["ability"], first["extra_info"]["split"]) == ("coding", "train")
    assert [row["extra_info"]["index"] for row in (first, second)] == ["abc900_a", "3001"]
    create = first["extra_info"]["tools_kwargs"]["code"]["create_kwargs"]
    assert create["ground_truth"] == first["reward_model"]["ground_truth"]
    assert len(read_problem(first["reward_model"]["ground_truth"], first["extra_info"]).printing) == 2


@pytest.mark.slow
@pytest.mark.parametrize("form", list(GoldForm))
def test_verl_takes_prepared_rows_in_every_form(form, tmp_path):
    pytest.importorskip("verl")
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from afm.models.tiny import train_tokenizer
    from afm.rollout.routes import AgentRoute, routes_of
    from verl_ext.rows import read_rows

    spec, path = load_agent("mhqa"), tmp_path / "rl.parquet"
    tasks = [
        Task(id=f"t{n}", question=f"who is {n}?", ground_truth=[f"a{n}"], data_source="nq") for n in range(3)
    ]
    write_rl(tasks, spec, path, gold=form)
    train_tokenizer([spec.user_message("who is 1?")], tmp_path / "tok", vocab_size=400)
    config = OmegaConf.create({"max_prompt_length": 4096, "return_raw_chat": True})
    rows = RLHFDataset(str(path), AutoTokenizer.from_pretrained(tmp_path / "tok"), config)
    assert rows[1]["raw_prompt"] == [{"role": "user", "content": spec.user_message("who is 1?")}]
    assert [rows[n]["index"] for n in range(3)] == ["t0", "t1", "t2"]
    assert rows[1]["tools_kwargs"].keys() == {"wiki_search"}
    found = read_rows([str(path)], routes_of(AgentRoute(agent="mhqa"), {}, load_agent), {})
    counts = (found.good, found.bad.count, found.repeated.count, found.unnamed, found.other_prompts)
    assert counts == (3, 0, 0, 0, 0)
    assert dict(found.scorers) == {"exact_match": 3}
