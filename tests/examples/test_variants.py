"""The variants of examples/svamp: what is added or asked, what stays, and what is never made."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

NUMBER_OF_PENS = re.compile(r"(\d+) pens")
SCRIPT = Path(__file__).parents[2] / "examples/svamp/variants.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("variants", SCRIPT)
    assert spec
    assert spec.loader
    module = sys.modules["variants"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_statement_is_about_one_person_and_one_number(script: ModuleType) -> None:
    question = (
        "Tom has 7 red kites. She sold 9 pens. Tom has 24. Mary had 3 cents. Ann gave Bob 4 pens. Eve has more than 8 pens."
        " The has 5 cups. How many kites has Tom?"
    )
    assert [(found.name, found.rest, found.number) for found in script.statements([question])] == [
        ("Tom", " has 7 red kites.", "7")
    ]


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Amy baked 5 pies. How many are left?", "Amy baked 5 pies. Amy has 7 red kites. How many are left?"),
        (
            "There were 5 pies. How many are left?",
            "There were 5 pies. Tom has 7 red kites. How many are left?",
        ),
        ("Amy baked 7 pies. How many are left?", None),  # the same number
        ("Amy saw 5 kites. How many are left?", None),  # the same things
        ("If Amy has 5 pies, how many are left?", None),  # no place between two sentences
    ],
)
def test_a_statement_is_added_where_it_does_not_matter(
    script: ModuleType, question: str, expected: str | None
) -> None:
    candidates = list(script.statements(["Tom has 7 red kites. Amy saw 5 red kites. How many?"]))
    assert script.with_statement(question, candidates, random.Random(0)) == expected


def test_the_command_keeps_each_question_and_its_program(tmp_path: Path) -> None:
    source, out = tmp_path / "train.jsonl", tmp_path / "more.jsonl"
    rows = [
        {
            "id": "a",
            "question": "Tom has 7 red kites. He sold 2. How many are left?",
            "ground_truth": "5",
            "extra_info": {"program": "print(7-2)"},
        },
        {
            "id": "b",
            "question": "There were 5 pies. How many are left?",
            "ground_truth": "5",
            "extra_info": {"program": "print(5)"},
        },
    ]
    again = rows[1] | {"id": "c"}
    source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, again]))
    command = [sys.executable, str(SCRIPT), str(source), str(out), "--seed", "3"]
    assert (
        "different questions: 2 of 3, variants: 2"
        in subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    first = out.read_text()
    written = [json.loads(line) for line in first.splitlines()]
    assert [row["id"] for row in written] == ["a", "b", "b-distractor", "c-distractor"]
    assert [{key: row[key] for key in rows[0]} for row in written[:2]] == rows
    assert written[2]["question"] == "There were 5 pies. Tom has 7 red kites. How many are left?"
    assert written[2]["extra_info"] == rows[1]["extra_info"]
    subprocess.run(command, check=True, capture_output=True)
    assert out.read_text() == first
    source.write_text('{"id": "a"\n')
    broken = subprocess.run(command, capture_output=True, text=True)
    assert (broken.returncode, "Traceback" in broken.stderr) == (2, False)
    assert "train.jsonl:1" in broken.stderr
    source.unlink()
    missing = subprocess.run(command, capture_output=True, text=True)
    assert missing.returncode == 2
    assert "train.jsonl" in missing.stderr
    assert out.read_text() == first


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (
            "Tom has 7 kites. He sold 2. How many kites are left?",
            {
                "Tom has 7 kites and N pens. He sold 2. How many kites are left?",
                "Tom has N pens and 7 kites. He sold 2. How many kites are left?",
                "Tom has 7 kites. Tom has N pens. He sold 2. How many kites are left?",
                "Tom has N pens. Tom has 7 kites. He sold 2. How many kites are left?",
            },
        ),
        (
            "There are 7 red kites in a box. How many kites are there?",
            {None},  # who asks for kites may mean others too
        ),
        (
            "There are 7 red kites in a box. How many red kites are there?",
            {
                "There are 7 red kites and N pens in a box. How many red kites are there?",
                "There are N pens and 7 red kites in a box. How many red kites are there?",
            },
        ),
        ("Tom has 7 kites. He sold 2. How many are left?", {None}),  # of what?
        ("Tom has 7 pens. He sold 2. How many pens are left?", {None}),  # the only other thing
        ("Tom has 7 more kites than pens. How many more kites has he?", {None}),
    ],
)
def test_other_things_are_added_where_the_question_names_its_own(
    script: ModuleType, question: str, expected: set[str | None]
) -> None:
    found = {script.more_things(question, ["pens"], random.Random(seed)) for seed in range(60)}
    assert {text and NUMBER_OF_PENS.sub("N pens", text) for text in found} == expected
    added = [int(match[1]) for text in found if text for match in NUMBER_OF_PENS.finditer(text)]
    assert all(2 <= number <= 23 and str(number) not in script.NUMBER.findall(question) for number in added)


def test_a_fifth_of_the_questions_is_held_out_for_reinforcement(tmp_path: Path) -> None:
    source, out, rl = (tmp_path / f"{name}.jsonl" for name in ("train", "sft", "rl"))
    asked = [f"Pack {'x' * (n // 2)} has {n + 3} kites. How many?" for n in range(400)]
    source.write_text(
        "".join(
            json.dumps({"id": str(n), "question": q, "ground_truth": "1"}) + "\n" for n, q in enumerate(asked)
        )
    )
    subprocess.run([sys.executable, str(SCRIPT), str(source), str(out), "--rl", str(rl)], check=True)
    ids = {
        file: {int(json.loads(line)["id"]) for line in file.read_text().splitlines()} for file in (out, rl)
    }
    assert ids[out] | ids[rl] == set(range(400))
    assert not ids[out] & ids[rl]
    assert 50 <= len(ids[rl]) <= 110
    assert {n // 2 for n in ids[rl]}.isdisjoint(n // 2 for n in ids[out])  # the same text with other numbers


@cache
def printed(program: str) -> float:
    """Return what Python itself prints."""
    command = [sys.executable, "-c", program]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def other_questions(script: ModuleType, question: str, program: str, answer: str) -> dict[str, set[str]]:
    """Return each kind's questions and programs over many seeds, without numbers that are drawn."""
    task = script.Task(
        id="a", question=question, ground_truth=answer, extra_info={"program": f"print({program})"}
    )
    found: dict[str, set[str]] = {}
    for seed in range(80):
        for made in script.other_questions(task, [], random.Random(seed)):
            assert printed(made.extra_info["program"]) == float(made.ground_truth)
            kind = made.id.removeprefix("a-")
            drawn = r"(?<=found )\d+|(?<=[+-])\d+(?=\)$)" if kind == "change" else r"(?!)"
            text = f"{made.question} {made.extra_info['program']}"
            found.setdefault(kind, set()).add(re.sub(drawn, "N", text))
    return found


def test_an_inverse_states_the_answer_and_asks_for_a_number(script: ModuleType) -> None:
    question = "Joan had 9 blue kites in her bag. She sold 4 of her kites. How many kites does she have now?"
    assert other_questions(script, question, "9-4", "5")["inverse"] == {
        "Joan had some blue kites in her bag. She sold 4 of her kites. She has 5 kites now. "
        "How many blue kites did Joan have in her bag at first? print(5+4)",
        "Joan had 9 blue kites in her bag. She sold some of her kites. She has 5 kites now. How many kites did she sell? "
        "print(9-5)",
    }


def test_a_comparison_asks_for_other_numbers_of_the_text(script: ModuleType) -> None:
    question = "Amy has 4 kites and 9 pens, and Ben has 7 kites. Cy had 3 kites. How many pens does she have?"
    assert other_questions(script, question, "9+0", "9")["comparison"] == {
        "Amy has 4 kites and 9 pens, and Ben has 7 kites. Cy had 3 kites. " + asked
        for asked in (
            "How many more pens than kites does Amy have? print(9-4)",
            "How many kites and pens does Amy have in all? print(4+9)",
            "How many more kites does Ben have than Amy? print(7-4)",
            "How many fewer kites does Amy have than Ben? print(7-4)",
            "How many kites do Amy and Ben have together? print(4+7)",
        )
    }


def test_what_a_person_has_is_compared_before_it_changes(script: ModuleType) -> None:
    question = "Fred has 5 kites and 9 pens. Sue bought 3 of his kites. How many kites are left?"
    assert other_questions(script, question, "5-3", "2")["comparison"] == {
        "Fred has 5 kites and 9 pens. Sue bought 3 of his kites. " + asked
        for asked in (
            "How many more pens than kites did Fred have at first? print(9-5)",
            "How many kites and pens did Fred have at first? print(5+9)",
        )
    }
    once_more = "Fred picked 5 kites and 9 pens. Today he picked 4 more. How many pens did he pick today?"
    assert "comparison" not in other_questions(script, once_more, "4+0", "4")


def test_a_change_happens_before_the_question(script: ModuleType) -> None:
    question = "Joan had 90 kites. She sold 4 kites. How many kites does she have now?"
    found = other_questions(script, question, "90-4", "86")["change"]
    before, after = (
        "Joan had 90 kites. She sold 4 kites. She then found N",
        "How many kites does she have now?",
    )
    assert f"{before} more kites. {after} print(90-4+N)" in found
    assert all(text.startswith("Joan had 90 kites. She sold 4 kites. She then ") for text in found)


def test_nothing_is_divided_by_zero(script: ModuleType) -> None:
    question = "Amy sold 0 kites. She buys 5 kites. How many kites does she buy?"
    found = other_questions(script, question, "0*5", "0")["inverse"]
    assert {text.rpartition("? ")[2] for text in found} == {"print(0/5)"}  # not 0/0


def test_large_numbers_keep_all_digits(script: ModuleType) -> None:
    question = "Amy had 1234567 kites and 7 pens. How many kites did she have?"
    programs = other_questions(script, question, "1234567+0", "1234567")["comparison"]
    assert {text.rpartition("? ")[2] for text in programs} == {"print(1234567-7)", "print(1234567+7)"}


@pytest.mark.parametrize(
    ("question", "program", "answer"),
    [
        (
            "Amy has 40 kites. She sold 7 of her kites. How many kites does she have now?",
            "40/7",
            "5",
        ),  # not its answer
        ("Amy sold 9 kites. How many kites did she sell?", "open('x')", "9"),
        ("Joan had 9 kites. How many kites did she have to begin with?", "9+2", "11"),  # a change comes later
        (
            "Joan had 9 problems. She did 2 and 1. How many problems does she have now?",
            "9-2-1",
            "6",
        ),  # nobody sells them
        ("Mrs. Hilt had 4 kites. Hilt then sold some. How many kites are left?", "4-1", "3"),
        ("Joan had 4 kites. She sold 4 kites. How many kites does she have together?", "4-4", "0"),
        ("Joan had 2.5 kites. How many kites does she have now?", "round(2.5+1, 1)", "3.5"),
        ("Joan glorped 9 kites. She glorped 4 kites. How many kites will she glorp?", "9+4", "13"),
    ],
)
def test_other_questions_are_not_made_where_they_might_be_wrong(
    script: ModuleType, question: str, program: str, answer: str
) -> None:
    assert other_questions(script, question, program, answer) == {}
