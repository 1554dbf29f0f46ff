import json

import pytest

from afm.agents import PromptMode, PromptSource, PromptTemplate, load_agent
from afm.agents.prompt_record import (
    PROMPT_FILE,
    PromptRecord,
    PromptTally,
    check_prompts,
    prompt_difference,
    prompts_of_run,
    record_of_model,
)
from afm.errors import ConfigError, DataError

MATH = load_agent("math")
RULES = "Solve it in <plan> and <answer>.\nOne step at a time.\n\nTask:\n"


def user(text, system=""):
    turns = [{"role": "system", "content": system}] if system else []
    return [*turns, {"role": "user", "content": text}]


def record(*prompts, known=(), mode=PromptMode.ROW):
    tally = PromptTally(mode, known)
    for prompt in prompts:
        tally.add(prompt)
    return tally.record()


def test_prompts_are_counted_with_the_question_cut_out():
    found = record(user(RULES + "1 + 1?"), user(RULES + "2 + 2?"), user("Question: 3?", "Be brief."))
    assert [(one.system, one.user, one.rows) for one in found.templates] == [
        ("", RULES + "{question}", 2),
        ("Be brief.", "Question: {question}", 1),
    ]
    assert (found.more, found.unknown, found.the_one) == (0, 0, None)


def test_a_mark_inside_a_question_is_no_second_prompt():
    rows = [user(f"{RULES}{number}?") for number in range(3)]
    within = user(f"{RULES}Read this.\nQuestion: how many?")
    assert [one.rows for one in record(within, *rows).templates] == [4]
    # An instruction may hold an example: then the last mark of all rows is the one.
    example = [user(f"For example\nQuestion: 1?\nNow yours.\n\nQuestion: {number}") for number in range(3)]
    assert record(*example).the_one.before.endswith("Now yours.\n\nQuestion: ")


def test_a_bare_question_behind_a_system_turn_is_a_prompt_and_a_prompt_without_a_mark_is_unknown():
    assert record(user("How many?", "Rules.")).the_one == PromptTemplate("", "", "Rules.")
    assert record(user("Use <plan>. How many?", "Rules.")).unknown == 1
    assert record(user("Use plans. How many?")).unknown == 1


def test_the_line_break_of_another_system_belongs_to_the_prompt():
    found = record(*(user(f"{RULES}{number}?".replace("\n", "\r\n")) for number in range(2)))
    assert found.the_one == PromptTemplate(RULES.replace("\n", "\r\n"))


@pytest.mark.parametrize("number", range(8))
def test_a_prompt_that_goes_on_behind_the_question_is_never_taken_for_the_shorter_one(number):
    short, longer = (PromptTemplate.of_text(f"Q{number}: {{question}}{end}") for end in ("", "\nIn a word."))
    for known in ((short, longer), (longer, short)):
        assert record(*(longer.messages("1?"),), known=known).the_one == longer


def test_chats_of_several_turns_are_not_counted():
    chat = [*user("Hi"), {"role": "assistant", "content": "Ho"}, *user("Question: 1?")]
    assert record(chat) == PromptRecord(mode=PromptMode.ROW)


def test_known_prompts_are_found_first_and_whole():
    known = PromptTemplate("Task:\n", "\nAnswer in one line.")
    found = record(user("Task:\n1?\nAnswer in one line."), known=[known, PromptTemplate("", "\nline.")])
    assert found.the_one == known


def test_the_most_frequent_are_kept_and_the_rest_is_counted():
    rows = [user(f"Rules {number}.\nTask:\n1?") for number in range(40)]
    found = record(*rows, user("Rules 39.\nTask:\n2?"))
    assert (len(found.templates), found.more, found.templates[0].rows) == (32, 8, 2)
    other = record(user("Rules x.\nTask:\n1?"))
    assert prompt_difference(other, found) is None  # it may be one of the eight


def test_a_difference_names_the_first_line_and_the_ways_out():
    trained = record(user(RULES + "1?"), user("Question: 1?"))
    asked = record(user(RULES.replace("One step", "Two steps") + "1?"), user("Question: 5?"))
    with pytest.raises(ConfigError) as caught:
        check_prompts(asked, trained, "models/x")
    assert str(caught.value) == (
        "prompt: models/x was trained with another prompt: 1 row, line 2 of the user turn: "
        "got 'Two steps at a time.', expected 'One step at a time.'; use prompt=row (each row's own), prompt=FILE "
        "(the text that the model was trained with), or prompt_check=off to use another prompt on purpose"
    )
    check_prompts(record(user(RULES + "9?")), trained, "models/x")
    check_prompts(asked, None, "models/x")


def test_a_difference_of_systems_and_of_lengths_is_shown():
    trained = record(user("Task:\n1?", "Rules."))
    assert "line 1 of the system turn: got '', expected 'Rules.'" in prompt_difference(
        record(user("Task:\n1?")), trained
    )
    longer = record(user("Task:\n1?", "Rules.\nMore."))
    assert "line 2 of the system turn: got 'More.', expected no such line" in prompt_difference(
        longer, trained
    )
    far = record(user("x" * 200 + "a" * 100 + "\nTask:\n1?"))
    near = record(user("x" * 200 + "b" * 100 + "\nTask:\n1?"))
    shown = f"got ...'{'x' * 20}{'a' * 60}'..., expected ...'{'x' * 20}{'b' * 60}'..."
    assert shown in prompt_difference(far, near)


def test_the_prompts_of_a_run_in_each_mode(tmp_path):
    rows = [("a:1", "1 + 1?", tuple(user(RULES + "1 + 1?"))), ("a:2", "2?", None)]
    own = prompts_of_run(PromptSource(), MATH, rows)
    assert (own.mode, own.the_one) == (PromptMode.OWN, PromptTemplate.of_agent(MATH))
    (tmp_path / "prompt.txt").write_text("Task:\n{question}")
    asked = prompts_of_run(PromptSource.load(tmp_path / "prompt.txt"), MATH, rows)
    assert (asked.mode, asked.the_one) == (PromptMode.FILE, PromptTemplate("Task:\n"))
    with pytest.raises(DataError, match=r"^a:2: prompt=row, but the row holds no prompt"):
        prompts_of_run(PromptSource.load("row"), MATH, rows)
    filled = PromptSource.load("row").filled_by(PromptTemplate(RULES))
    assert prompts_of_run(filled, MATH, rows).the_one == PromptTemplate(RULES)


def test_a_single_row_is_read_by_the_models_prompts():
    trained = record(*[user(f"{RULES}{number}?") for number in range(3)])
    row = ("a:1", "?", tuple(user(f"{RULES}Read this.\nQuestion: how many?")))
    assert prompt_difference(prompts_of_run(PromptSource.load("row"), MATH, [row], trained), trained) is None


def test_a_second_training_keeps_the_first_ones_prompts_unless_it_changes_them():
    first = record(user("Task:\n1?"), user("Question: 1?"), user("Question: 2?"))
    second = record(user("Question: 1?"))
    both = second.after(first)
    assert {one.user: one.rows for one in both.templates} == {
        "Task:\n{question}": 1,
        "Question: {question}": 1,
    }
    other = record(user("Aufgabe\nTask: 1?"))
    assert other.after(first) == other
    assert other.after(None) == other


def test_a_models_folder_says_what_it_was_trained_with(tmp_path):
    found = record(user(RULES + "1?"))
    found.save(tmp_path / "model" / PROMPT_FILE)
    (tmp_path / "model/config.json").write_text("{}")
    assert record_of_model(tmp_path) == record_of_model(tmp_path / "model") == found
    assert record_of_model(tmp_path / "other") is None
    assert record_of_model("http://127.0.0.1:1/v1") is None
    (tmp_path / "model" / PROMPT_FILE).write_text("{")
    with pytest.raises(ConfigError, match=r"prompt.json: cannot be read"):
        record_of_model(tmp_path)


def test_a_record_whose_text_was_changed_is_refused(tmp_path):
    file = tmp_path / "prompt.json"
    template = PromptTemplate.of_text("Use tags.\n\nQuestion: {question}")
    entry = {"digest": template.digest, "user": "Use boxes.\n\nQuestion: {question}", "rows": 3}
    file.write_text(json.dumps({"mode": "row", "templates": [entry]}))
    with pytest.raises(
        ConfigError,
        match=r"templates.0: got the digest '\w+', expected '\w+' for its text; copy the file again",
    ):
        PromptRecord.load(file)


def test_an_agent_that_asks_with_the_bare_question_hides_no_prompt_of_a_row():
    bare = load_agent("configs/tiny/agents/mhqa.yaml")
    rows = [(f"row {number}", f"{number}?", user(f"{RULES}{number}?")) for number in range(3)]
    asked = prompts_of_run(PromptSource.load("row"), bare, rows)
    assert [one.user for one in asked.templates] == [RULES + "{question}"]
    own = prompts_of_run(PromptSource.load("own"), bare, rows)
    assert [one.user for one in own.templates] == ["{question}"]


def test_the_question_alone_is_the_prompt_of_an_agent_without_one_and_the_last_guess_for_rows():
    bare = PromptTemplate("")
    rows = [user("How many?"), user("Task:\n1?")]
    assert record(*rows, known=[bare], mode=PromptMode.OWN).the_one == bare
    assert {one.user: one.rows for one in record(*rows, known=[bare]).templates} == {
        "{question}": 1,
        "Task:\n{question}": 1,
    }
