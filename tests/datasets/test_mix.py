import json
from functools import partial
from pathlib import Path

import pytest

from afm.agents import load_agent
from afm.datasets import read_tasks
from afm.datasets.hub_sets import Preparation, Product, read_hub_sets
from afm.datasets.mix import mix_sources, prepare_mix
from afm.datasets.prepared import asks_for_proof
from afm.datasets.readers import READERS
from afm.datasets.readers.programs import count_tests
from afm.errors import ConfigError, DataError, UsageError

pq = pytest.importorskip("pyarrow.parquet")

ROOT = Path(__file__).parents[2]
SETS = """\
sets:
  programs:
    repository: own/programs
    prepare: [{reader: codeforces, into: tasks, agent: code, ability: coding, min_tests: 3}]
  sums:
    repository: own/sums
    prepare: [{reader: math_problem, into: rl, data_source: math500, agent: math, ability: math, no_proofs: true, target: 4, seed: 1}]
  more_sums:
    repository: own/more
    prepare: [{reader: math_problem, into: rl, data_source: aime24, agent: math, ability: math}]
  chats:
    repository: own/chats
    prepare: [{reader: retool, into: chat}]
mixes:
  train: {into: rl, parts: [programs, sums, more_sums]}
  questions: {into: tasks, parts: [sums, more_sums]}
"""


def problem(name, tests):
    cases = [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in range(tests)]
    return {"id": name, "description": f"Print twice the number ({name}).", "official_tests": cases}


def rows(path, *items):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(item) + "\n" for item in items))


@pytest.fixture
def data(tmp_path):
    """Downloads of the sets."""
    folder = tmp_path / "raw"
    rows(folder / "programs/p.jsonl", problem("1/A", 2), problem("1/B", 3), problem("1/B", 3), {"id": "1/C"})
    sums = [{"id": str(n), "problem": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(9)]
    proof = {"id": "9", "problem": "Prove that 1+1=2.", "answer": "2"}
    rows(folder / "sums/s.jsonl", *sums, proof)
    new = {"id": "1", "problem": "And 7+1?", "answer": "8"}
    rows(folder / "more_sums/m.jsonl", sums[0], new)
    return folder


@pytest.fixture
def sets(tmp_path):
    path = tmp_path / "sets.yaml"
    path.write_text(SETS)
    return path


@pytest.fixture
def prepare(said, sets, data, tmp_path):
    """Makes the mix ``train`` in ``rl``."""
    words = ("data", "prepare", "mix", sets, "train", "--data", data)
    return partial(said, *words, "--output-dir", tmp_path / "rl")


def test_one_command_makes_a_file_of_several_agents(prepare, tmp_path):
    assert "sums: 1 file by reader math_problem, made into rl" in prepare("--dry-run")
    assert not (tmp_path / "rl").exists()
    printed = prepare()
    table = pq.read_table(tmp_path / "rl/train.parquet").to_pylist()
    kinds = [(row["data_source"], row["ability"]) for row in table]
    assert kinds[:5] == [("codeforces", "coding")] + [("math500", "math")] * 4
    assert all(kind == ("aime24", "math") for kind in kinds[5:])
    for row in table:
        spec = load_agent("code" if row["ability"] == "coding" else "math")
        assert row["prompt"] == spec.prompt_messages(row["extra_info"]["question"])
        assert set(row["extra_info"]["tools_kwargs"]) == {"code"}
    noted = json.loads((tmp_path / "rl/train.manifest.json").read_text())
    counts = {"read": 16, "made": len(table), "repeated": 1, "bad": 1, "renamed": 0}
    assert noted["counts"] == counts | {"left_out": 14 - len(table)}
    programs, sums, more = (noted["parts"][name] for name in ("programs", "sums", "more_sums"))
    assert programs["left_out"] == {"fewer than 3 tests": 1}
    assert (programs["counts"]["repeated"], programs["counts"]["bad"], programs["min_tests"]) == (1, 1, 3)
    assert sums["left_out"] == {"asks for a proof": 1, "not drawn": 5}
    drawn_zero = "What is 0+0?" in [row["extra_info"]["question"] for row in table]
    assert more["left_out"] == ({"repeats a question of an earlier row": 1} if drawn_zero else {})
    assert "left out: 5 not drawn" in printed
    [bad] = (tmp_path / "rl/train.bad_rows.jsonl").read_text().splitlines()
    assert json.loads(bad)["line"] == 4


def test_draws_depend_on_the_seed_and_not_on_the_order_of_rows(sets, data, tmp_path):
    def questions(out):
        prepare_mix("questions", read_hub_sets(sets), data, out)
        tasks = read_tasks(out / "questions.jsonl")
        return {task.question for task in tasks if task.data_source == "math500"}

    first = questions(tmp_path / "one")
    assert len(first) == 4
    lines = (data / "sums/s.jsonl").read_text().splitlines(keepends=True)
    (data / "sums/s.jsonl").write_text("".join(reversed(lines)))
    assert questions(tmp_path / "two") == first
    sets.write_text(SETS.replace("seed: 1", "seed: 2"))
    assert questions(tmp_path / "three") != first


def test_ids_of_two_sets_never_meet(sets, data, tmp_path):
    sums = [{"id": str(n), "problem": f"{n} times 3?", "answer": str(3 * n)} for n in range(9)]
    rows(data / "more_sums/m.jsonl", *sums)
    mixed = prepare_mix("train", read_hub_sets(sets), data, tmp_path / "rl")
    ids = [task.id for task in read_tasks(mixed.paths[0])]
    assert len(ids) == len(set(ids)) == mixed.rows == 1 + 4 + 9
    assert sum(name.startswith("more_sums-") for name in ids) == 4


def test_rows_are_held_out_of_every_part(sets, data, tmp_path):
    rows(data / "programs/p.jsonl", *(problem(f"1/{n}", 3) for n in range(40)))
    held = SETS.replace("{into: rl, parts", "{into: rl, name: rl/train, validation: {rows: 4}, parts")
    sets.write_text(held.replace("target: 4, ", ""))
    mixed = prepare_mix("train", read_hub_sets(sets), data, tmp_path)
    assert mixed.paths == (tmp_path / "rl/train.parquet", tmp_path / "rl/val.parquet")
    train, val = (pq.read_table(path).to_pylist() for path in mixed.paths)
    assert [row["ability"] for row in val] == ["coding", "coding", "math"]
    assert {row["extra_info"]["split"] for row in val} == {"val"}
    questions = {row["extra_info"]["question"] for row in train + val}
    assert len(questions) == len(train) + len(val) == mixed.rows == 40 + 9 + 1
    noted = json.loads((tmp_path / "rl/train.manifest.json").read_text())
    assert set(noted["outputs"]) == {"train.parquet", "val.parquet"}


def test_rows_ask_with_the_prompts_that_the_mix_names(prepare, sets, data, tmp_path):
    sets.write_text(SETS.replace("train: {", "train: {prompts: {math: prompts/sums.txt}, "))
    assert f"{data}/prompts/sums.txt" in prepare(status=1)
    (data / "prompts").mkdir()
    (data / "prompts/sums.txt").write_text("Use tags.\n\nQuestion: {question}\n")

    def prompts(*options):
        prepare(*options)
        table = pq.read_table(tmp_path / "rl/train.parquet").to_pylist()
        return {
            row["ability"]: row["prompt"][0]["content"].replace(row["extra_info"]["question"], "?")
            for row in table
        }

    assert prompts() == {"math": "Use tags.\n\nQuestion: ?", "coding": load_agent("code").user_message("?")}
    assert prompts("--own-prompts")["math"] == load_agent("math").user_message("?")


def test_only_selected_questions_are_taken(sets, data, tmp_path):
    sets.write_text(SETS.replace("target: 4, ", ""))
    kept = [{"question": "What is 3+3?", "answer": "6"}, {"question": "And  7+1?", "answer": "8"}]
    rows(tmp_path / "math.jsonl", *kept)
    rows(tmp_path / "code.jsonl", {"question": "What is 4+4?", "answer": "8"})
    files = [tmp_path / "math.jsonl", tmp_path / "code.jsonl"]
    mixed = prepare_mix("questions", read_hub_sets(sets), data, tmp_path, keep=files)
    questions = [task.question for task in read_tasks(mixed.paths[0])]
    assert questions == ["What is 3+3?", "What is 4+4?", "And 7+1?"]
    assert mixed.parts["sums"].left_out == {"asks for a proof": 1, "not among the questions to keep": 7}
    noted = json.loads((tmp_path / "questions.manifest.json").read_text())
    assert set(noted["keep"]) == {"math.jsonl", "code.jsonl"}


def test_sets_that_are_not_there_and_parts_without_rows_are_told(sets, data, tmp_path):
    known = read_hub_sets(sets)
    with pytest.raises(UsageError, match="trian: no such mix; did you mean 'train'"):
        known.mix("trian")
    only = "--only programs --only sums --only more_sums"
    with pytest.raises(DataError, match=f"lacks 3 sets; fetch them .* {only}"):
        mix_sources("train", known, tmp_path)
    rows(data / "programs/p.jsonl", problem("1/A", 2))
    with pytest.raises(DataError, match="part 'programs' gives no row: 1 fewer than 3 tests"):
        prepare_mix("train", known, data, tmp_path / "rl")
    assert not (tmp_path / "rl").exists()
    sets.write_text(SETS.replace("[sums, more_sums]", "[sum]"))
    with pytest.raises(ConfigError, match="nothing is prepared as 'sum'; did you mean 'sums'"):
        read_hub_sets(sets)
    sets.write_text(SETS.replace("[sums, more_sums]", "[chats]"))
    with pytest.raises(ConfigError, match="made into chat"):
        read_hub_sets(sets)
    with pytest.raises(ValueError, match="choose among questions, not rows of sft"):
        Preparation(reader="afm_sft", into=Product.SFT, target=3)


def test_tests_are_counted_in_every_layout():
    assert count_tests({"stdin": ["1", "2"], "expected_output": ["1", "2"]}) == 2
    assert count_tests({"inputs": [["1"], ["2"], ["3"]], "outputs": [1, 2, 3], "fn_name": "f"}) == 3
    program = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 6\n"
    assert count_tests({"test": program, "entry_point": "f"}) == 2


@pytest.mark.parametrize(
    ("question", "proof"),
    [
        ("Prove that $\\sqrt{2}$ is irrational.", True),
        ("Let n be odd. Show that n^2-1 is divisible by 8.", True),
        ("Find all n with n^2 = 4, and prove your answer.", False),
        ("Find the smallest $n$ of the kind, or show that there is none.", False),
        ("The proof of a theorem has 12 pages; how many lines?", False),
        ("An approved list shows that 5 of 9 won. What is 5*9?", False),
        ("What improves the score most?", False),
    ],
)
def test_problems_that_ask_for_a_proof(question, proof):
    assert asks_for_proof(question) is proof


def test_problems_of_retool_are_read_without_its_answer_format():
    asked = "Use programs.\n*user question:*\nSolve it and put the answer in \\boxed{answer}\n\nWhat is 6*7?\n\n\nRemember to place the final answer in a box."
    reply = "<code>print(6*7)</code><interpreter>42</interpreter>So <answer>\\boxed{42}</answer>"
    row = {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]}
    task = READERS["retool_questions"].read(row, "r-1")
    assert (task.id, task.question, task.ground_truth) == ("r-1", "What is 6*7?", "42")
    row["messages"][1]["content"] = "No box."
    with pytest.raises(DataError, match="the last reply has no"):
        READERS["retool_questions"].read(row, "r-1")


def test_the_shipped_mixes_train_on_programs_and_sums_and_on_the_files_with_official_tests():
    known = read_hub_sets(ROOT / "configs/data/code_agent.yaml")
    assert {known.preparations[part][1].ability for part in known.mix("train").parts} == {"coding", "math"}
    assert known.sets["codeforces"].wants("verifiable-prompts/train-00000-of-00019.parquet")
    assert not known.sets["codeforces"].wants("data/train-00000-of-00011.parquet")
