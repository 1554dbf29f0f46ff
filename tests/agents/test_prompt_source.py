import json

import pytest

from afm.agents import PromptSource, PromptTemplate, load_agent
from afm.agents.prompt_source import row_messages
from afm.errors import ConfigError, DataError

MATH = load_agent("math")
ROW = ({"role": "system", "content": "Rules of the row."}, {"role": "user", "content": "Task:\n1 + 1?"})


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_own_is_the_agents_prompt_whatever_the_row_holds():
    assert PromptSource.load("own").messages(MATH, "1 + 1?", ROW) == MATH.prompt_messages("1 + 1?")
    assert PromptSource.load("own").recorded == {"mode": "own"}


def test_row_takes_the_rows_messages_and_refuses_a_row_without_unless_a_template_fills_in():
    source = PromptSource.load("row")
    assert source.messages(MATH, "other", ROW) == list(ROW)
    with pytest.raises(DataError, match=r"holds no prompt .*'1 \+ 1\?'.*prompt=FILE"):
        source.messages(MATH, "1 + 1?", None)
    filled = source.filled_by(PromptTemplate.of_text("Q: {question}"))
    assert filled.messages(MATH, "1 + 1?", None) == [{"role": "user", "content": "Q: 1 + 1?"}]
    assert filled.messages(MATH, "1 + 1?", ROW) == list(ROW)
    assert PromptSource.load("own").filled_by(PromptTemplate.of_text("Q: {question}")).template is None


def test_a_file_is_literal_but_for_the_question(tmp_path):
    file = write(tmp_path / "prompt.txt", "Use {roles} and {}.\n\nQuestion: {question}\n")
    source = PromptSource.load(file)
    assert source.messages(MATH, "Is {question} a word?", ROW) == [
        {"role": "user", "content": "Use {roles} and {}.\n\nQuestion: Is {question} a word?"}
    ]
    assert str(source) == str(file)


def test_words_behind_the_question_are_not_said_twice(tmp_path):
    source = PromptSource.load(
        write(tmp_path / "prompt.txt", "Rules.\nTask: {question}\nAnswer in a fence.\n\n")
    )
    row = [{"role": "user", "content": "Rules.\nTask: Double it.\nAnswer in a fence.\n"}]
    assert source.messages(MATH, "Double it.\nAnswer in a fence.", row) == row


def test_what_an_editor_of_windows_adds_is_no_part_of_the_prompt(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfBe brief.\r\n\r\nQuestion: {question}\r\n")
    assert PromptSource.load(file).template == PromptTemplate("Be brief.\n\nQuestion: ")


def test_a_yaml_has_a_system_turn(tmp_path):
    file = write(tmp_path / "prompt.yaml", "system: Be brief.\nuser: |-\n  Task:\n  {question}\n")
    assert PromptSource.load(file).messages(MATH, "1?") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Task:\n1?"},
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "", "a.txt:1: the prompt is empty"),
        ("a.txt", "one\ntwo\n", "a.txt:2: no {question}"),
        ("a.txt", "{question}\n\n{question}", "a.txt:3: got {question} 2 times, first in line 1"),
        ("a.yaml", "system: x\n", "a.yaml: user:1: the prompt is empty"),
        ("a.yaml", "text: x\n", "a.yaml: got the keys text, expected `user`"),
        ("a.yaml", "user: 3\n", "a.yaml: user: got 3, expected a text"),
        (
            "a.yaml",
            "system: '{question}'\nuser: '{question}'\n",
            "system: got {question}, which belongs in `user`",
        ),
    ],
)
def test_a_bad_file_is_refused_by_name_and_line(tmp_path, name, text, message):
    with pytest.raises(ConfigError) as caught:
        PromptSource.load(write(tmp_path / name, text))
    assert message in str(caught.value)


def test_a_file_that_is_not_there_is_named_with_the_other_choices(tmp_path):
    with pytest.raises(
        ConfigError, match=r"prompt: got 'rows', no such file; expected own .* row .* or a file"
    ):
        PromptSource.load("rows")


def test_what_runs_are_compared_by_changes_with_the_files_content(tmp_path):
    file = write(tmp_path / "prompt.txt", "Q: {question}")
    before = PromptSource.load(file).recorded
    write(file, "Question: {question}")
    assert before != PromptSource.load(file).recorded
    assert PromptSource.load(write(tmp_path / "other.txt", "Q: {question}\n")).recorded == before


def test_a_kept_file_asks_the_same_when_the_original_is_gone(tmp_path):
    file = write(tmp_path / "prompt.txt", "Two: lines\n\n 'q': {question} end\n")
    source = PromptSource.load(file)
    kept = source.kept_in(tmp_path / "run")
    file.unlink()
    again = PromptSource.load(kept.path)
    assert again.messages(MATH, "x") == source.messages(MATH, "x")
    assert again.recorded == source.recorded


def test_a_template_finds_the_question_of_its_own_prompts_alone():
    own = PromptTemplate.of_agent(MATH)
    assert own.question_in(MATH.prompt_messages("Is it\n{question}?")) == "Is it\n{question}?"
    assert own.question_in([{"role": "user", "content": "x"}]) is None
    assert own.question_in([{"role": "system", "content": "x"}, *MATH.prompt_messages("y")]) is None
    assert own.messages("z") == MATH.prompt_messages("z")


@pytest.mark.parametrize(
    "prompt", [None, "", [], 3, [{"role": "user"}], [{"role": "tool", "content": "x"}], ["x"]]
)
def test_what_is_no_chat_is_no_prompt(prompt):
    assert row_messages(prompt) is None


def test_a_text_is_one_user_turn():
    assert row_messages("Hi") == ({"role": "user", "content": "Hi"},)
    assert row_messages(json.loads(json.dumps(list(ROW)))) == ROW
