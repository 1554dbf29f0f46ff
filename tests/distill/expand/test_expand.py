"""Questions by model, against a real server whose brain reads the passages that it is shown."""

import json
import re
from pathlib import Path

import pytest

from afm.datasets import read_tasks
from afm.datasets.encyclopaedia.growth import Growth
from afm.distill.expand import expand, groups, read_expansion, read_passages
from afm.distill.expand_team import Proposal, Solution, SourcePassage, fault
from afm.distill.model_team.members import read_reply_as
from afm.errors import ConfigError, DataError

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs/expand/corpus.yaml"
A = SourcePassage(id="a", title="Ada Low", text="Ada Low was taught by Ben Ash. She liked tea.")
B = SourcePassage(id="b", title="Ben Ash", text="Ben Ash was born in 1701.")


def rejected(folder):
    return {json.loads(line)["rejected"] for line in (folder / "rejected.jsonl").read_text().splitlines()}


async def expanded(corpus, out, count):
    settings = [f"corpus={corpus}", f"output_dir={out}", "growth=depth", "size=3", f"count={count}"]
    return await expand(read_expansion(CONFIG, settings))


def proposal(**changed):
    evidence = [{"passage": 1, "quote": "taught by Ben Ash"}, {"passage": 2, "quote": "born in  1701"}]
    whole = {"question": "When was the teacher of Ada Low born?", "answer": "1701", "evidence": evidence}
    return Proposal.model_validate(whole | changed)


BORN = {"passage": 2, "quote": "born in 1701"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"evidence": [BORN]}, "expected each of 1 to 2"),
        ({"evidence": [{"passage": 1, "quote": "taught by Eve"}, BORN]}, "word for word in passage 1"),
        ({"answer": "1702"}, "answer: '1702' does not occur in the evidence"),
        ({"answer": "170"}, "answer: '170' does not occur in the evidence"),
        ({"question": "Was her teacher born in 1701?"}, "question: it holds the answer"),
    ],
)
def test_a_proposal_stands_on_words_of_every_passage(changed, message):
    assert fault(proposal(), [A, B]) == ""
    assert message in fault(proposal(**changed), [A, B])


async def test_a_solver_that_replies_in_another_form_is_asked_again_and_proves_nothing(tmp_path, reader):
    write_corpus(tmp_path / "corpus.jsonl", 1)

    def other_form(member, user):
        if member == "proposer" or user.count("Passage: ") == 3:
            return brain(member, user)
        return {"thought": None, "final_answer": "1000"}

    reader.replies = other_form
    await expanded(tmp_path / "corpus.jsonl", tmp_path / "out", 1)

    [reason] = rejected(tmp_path / "out")
    assert reason == "solver: no usable reply in 3 attempts, the last one: answer: missing, but required"


@pytest.mark.parametrize(("reply", "read"), [('""', ""), ("null", ""), ("1702", "1702"), ('"x"', "x")])
def test_a_solvers_answer_may_be_empty_or_a_number(reply, read):
    assert read_reply_as(Solution, f'{{"thought": null, "answer": {reply}}}').answer == read


def test_by_depth_each_passage_names_the_next():
    assert next(groups([A, B], Growth.DEPTH, 2, 0)) == (A, B)
    with pytest.raises(ConfigError, match="gave 1 groups of 2 passages by depth and no more"):
        list(groups([A, B], Growth.DEPTH, 2, 0))


def test_a_row_that_is_no_passage_is_told_with_its_line(tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"id": "1", "contents": "\\"T\\"\\nText."}\n{"id": "2"}\n')
    with pytest.raises(DataError, match=r"corpus.jsonl:2: not a passage"):
        read_passages(file)


def write_corpus(path, chains):
    """Chains of three; the last passage of every fourth repeats what makes the one before needless."""
    rows = []
    for number in range(chains):
        first, second, third = (f"{word} N{number}x" for word in ("Ada", "Ben", "Cid"))
        rows.append({"id": f"{number}a", "title": first, "text": f"The friend of {first} is {second}."})
        sentence = f"The friend of {second} is {third}. The year of {third} is {1000 + number}."
        if number % 4:
            sentence = f"The friend of {second} is {third}."
        rows.append({"id": f"{number}b", "title": second, "text": sentence})
        rows.append({"id": f"{number}c", "title": third, "text": f"The year of {third} is {1000 + number}."})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def brain(member, user):
    """Proposes the year at the end of the chain; solves by following facts that it can see."""
    facts = dict(re.findall(r"The (\w+ of \w+ \w+) is ([\w ]+)\.", user))
    if member == "proposer":
        titles = re.findall(r"^Passage \d+: (.*)$", user, re.MULTILINE)
        quotes = [
            {"passage": 1, "quote": f"friend of {titles[0]} is {titles[1]}"},
            {"passage": 2, "quote": f"friend of {titles[1]} is {titles[2]}"},
            {"passage": 3, "quote": f"year of {titles[2]} is {facts[f'year of {titles[2]}']}"},
        ]
        return {
            "question": f"What is the year of the friend of the friend of {titles[0]}?",
            "answer": facts[f"year of {titles[2]}"],
            "evidence": quotes,
        }
    name = re.search(r"friend of (\w+ \w+)\?", user)[1]
    second = facts.get(f"friend of {name}", "")
    return {"answer": facts.get(f"year of {facts.get(f'friend of {second}', '')}", "")}


@pytest.fixture
def reader(teacher):
    teacher.members = {"You write one question": "proposer", "You answer a question": "solver"}
    teacher.replies = brain
    return teacher


async def test_only_questions_that_need_every_passage_are_kept(tmp_path, reader):
    write_corpus(tmp_path / "corpus.jsonl", 8)

    summary = await expanded(tmp_path / "corpus.jsonl", tmp_path / "out", 8)

    kept = list(read_tasks(summary.path))
    assert summary.kept == len(kept) == 6
    assert summary.rejected == {"solver": 2}
    assert rejected(tmp_path / "out") == {"passage 3 is not needed"}
    for task in kept:
        number = int(re.search(r"N(\d+)x", task.question)[1])
        assert number % 4
        assert task.ground_truth == str(1000 + number)
        assert task.extra_info["hops"] == 3
        assert [hop["passage"] for hop in task.extra_info["path"]] == [f"{number}{end}" for end in "abc"]
    assert summary.spent.tokens > 0
    assert 0 < summary.spent.usd < 1

    write_corpus(tmp_path / "other.jsonl", 9)
    other = await expanded(tmp_path / "other.jsonl", tmp_path / "more", 8)
    questions = {task.id: task.question for task in kept}
    for task in read_tasks(other.path):
        assert questions.setdefault(task.id, task.question) == task.question


async def test_what_the_solver_knows_or_finds_otherwise_is_rejected(tmp_path, reader):
    write_corpus(tmp_path / "corpus.jsonl", 3)

    async def reasons(replies, out):
        reader.replies = replies
        await expanded(tmp_path / "corpus.jsonl", tmp_path / out, 3)
        return rejected(tmp_path / out)

    def knows(member, user):
        year = 1000 + int(re.search(r"N(\d+)x", user)[1])
        return {"answer": str(year)} if member == "solver" else brain(member, user)

    def lies(member, user):
        return {"answer": "12"} if member == "solver" else brain(member, user)

    def invents(member, user):
        return brain(member, user) | {"answer": "never told"}

    assert await reasons(knows, "knows") == {"the solver knows the answer without any passage"}
    assert await reasons(lies, "lies") == {"the solver found '12' in the passages"}
    (reason,) = await reasons(invents, "invents")
    assert reason.startswith("proposer: no usable reply in 3 attempts")


def test_the_command_says_what_it_made(afm, tmp_path, reader):
    write_corpus(tmp_path / "corpus.jsonl", 4)
    words = (f"corpus={tmp_path / 'corpus.jsonl'}", f"output_dir={tmp_path / 'out'}", "size=3", "count=4")
    printed = afm("data", "expand", CONFIG, *words).stdout
    assert "3 questions of 4 groups" in printed
    assert "rejected: 1 solver" in printed
