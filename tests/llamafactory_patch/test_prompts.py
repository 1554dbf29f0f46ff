"""Prompts in SFT: rows of each layout in LLaMA-Factory's own pipeline, and their record."""

from types import SimpleNamespace

import pytest

from afm.agents import PromptSource, PromptTemplate, load_agent
from afm.agents.load import without_tools
from afm.agents.prompt_record import record_of_model
from afm.errors import ConfigError, DataError
from llamafactory_patch.conversations import aligned_row, turn
from llamafactory_patch.prompts import ASKED_COLUMN, PromptCounter, PromptState, RowPrompts, keep_record
from llamafactory_patch.settings import SftSettings

MATH = load_agent("math")
RULES = "Work in 'plan' and 'answer'.\n<plan> comes first.\n\nTask:\n"
SAID = "<plan>P.</plan><think>T.</think><answer>\\boxed{2}</answer>"


def aligned(user, *, system="", answer=SAID):
    return aligned_row([turn("user", user), turn("assistant", answer)], system=system)


def asked(value, user, *, row=None, **more):
    source = PromptSource.load(value)
    found = RowPrompts(source, "math").asked(aligned(user, **more), row or {})
    return found["_system"], found["_prompt"][0]["content"], found[ASKED_COLUMN]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "prompt.yaml"
    path.write_text("system: Be exact.\nuser: |-\n  Solve:\n  {question}\n")
    return path


def test_own_leaves_what_the_agent_asks_and_rewrites_another_instruction(file):
    own = MATH.user_message("1 + 1?")
    assert asked("own", own) == ("", own, PromptState.AS_IS)
    assert asked("own", own, system="Be kind.") == ("Be kind.", own, PromptState.AS_IS)
    assert asked("own", RULES + "1 + 1?\n") == ("", own, PromptState.REWRITTEN)
    assert asked("own", "Question: 1 + 1?", system="Rules with <plan>.") == ("", own, PromptState.REWRITTEN)
    assert asked("own", "1 + 1?") == ("", own, PromptState.REWRITTEN)
    assert asked(file, own) == ("Be exact.", "Solve:\n1 + 1?", PromptState.REWRITTEN)
    assert asked(file, RULES + "1 + 1?") == ("Be exact.", "Solve:\n1 + 1?", PromptState.REWRITTEN)
    assert asked(file, "Solve:\n1?", system="Be exact.") == ("Be exact.", "Solve:\n1?", PromptState.AS_IS)
    whole = "Solve:\n1?\nTask: 2?"  # only the system turn differs; the whole question is kept
    assert asked(file, whole, system="Be") == ("Be exact.", whole, PromptState.REWRITTEN)


def test_row_leaves_everything(file):
    assert asked("row", RULES + "1 + 1?", system="S") == ("S", RULES + "1 + 1?", PromptState.AS_IS)


def test_the_agent_without_tools_and_another_that_a_row_names_stay(file):
    bare = without_tools(MATH).user_message("1?")
    mhqa = load_agent("mhqa").user_message("1?")
    for value in ("own", file):
        assert asked(value, bare)[1:] == (bare, PromptState.AS_IS)
    assert asked("own", mhqa, row={"extra_info": {"agent": "mhqa"}})[1:] == (mhqa, PromptState.AS_IS)
    assert asked("own", mhqa)[1:] == (MATH.user_message("1?"), PromptState.REWRITTEN)


def test_chats_stay_as_they_are():
    chat = ("", "Task: hi?", PromptState.OTHER)
    for answer in ("Hello.", "<think>Let me see.</think> Hello.", "Use <answer>2</answer>."):
        assert asked("own", "Task: hi?", answer=answer) == chat
    assert asked("own", "Task: hi?", row={"extra_info": {"agent": ""}}) == chat
    several = aligned_row([turn("user", "Hi"), turn("assistant", SAID)] * 2)
    assert RowPrompts(PromptSource(), "math").asked(several, {})[ASKED_COLUMN] is PromptState.OTHER


@pytest.mark.parametrize(
    ("user", "message"),
    [
        (RULES + "Read.\nQuestion: how many?", "2 lines that begin with Question: or Task:"),
        (RULES.replace("Task:\n", "") + "1 + 1?", "no line Question: or Task: marks where"),
        ("Task:\n \n", "no line Question: or Task: marks where"),
        ("I have this list:\nTask: clean the room\nWhat is left?", "may be part of the question"),
    ],
)
def test_a_question_that_cannot_be_told_apart_is_refused(user, message):
    with pytest.raises(DataError) as caught:
        asked("own", user)
    assert message in str(caught.value)
    assert "prompt=row" in str(caught.value)


def test_a_record_is_asked_by_its_agent_or_a_file_and_has_no_prompt_of_its_own(file):
    row = aligned(MATH.user_message("1?"))
    assert RowPrompts(PromptSource(), "math").asked(row, {}, record=True)["_prompt"] == row["_prompt"]
    found = RowPrompts(PromptSource.load(file), "math").asked(row, {}, record=True)
    assert found["_prompt"][0]["content"] == "Solve:\n1?"
    with pytest.raises(DataError, match="a record has no prompt"):
        RowPrompts(PromptSource.load("row"), "math").asked(row, {}, record=True)


ROWS = [
    {"instruction": MATH.user_message("1 + 1?"), "input": "", "output": SAID},
    {"instruction": RULES + "2 + 2?", "input": "", "output": SAID},
    {"instruction": RULES[:-1], "input": "3 + 3?", "output": SAID},
    {"instruction": "Question: 4?", "output": SAID, "system": "Rules: <plan> first."},
    {"instruction": "Hi?", "output": "Hello."},
]


def prompts_of(built):
    return [text.split("<|im_start|>assistant\n")[0] for text in built.masked()]


def chat(user, system=""):
    begun = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{begun}<|im_start|>user\n{user}<|im_end|>\n"


def test_the_pipeline_trains_on_the_prompts_that_are_asked_for(pipeline, data_dir, tiny, file):
    folder = data_dir(ROWS)
    own = pipeline(tiny, folder, agent="math")
    questions = ("1 + 1?", "2 + 2?", "3 + 3?", "4?")
    assert prompts_of(own) == [*(chat(MATH.user_message(one)) for one in questions), chat("Hi?")]
    row = pipeline(tiny, folder, agent="math", prompt="row")
    fourth = chat("Question: 4?", "Rules: <plan> first.")
    assert prompts_of(row)[1:4] == [chat(RULES + "2 + 2?"), chat(RULES + "3 + 3?"), fourth]
    of_file = pipeline(tiny, folder, agent="math", prompt=str(file))
    assert prompts_of(of_file) == [*(chat(f"Solve:\n{one}", "Be exact.") for one in questions), chat("Hi?")]
    file.write_text("user: 'Q: {question}'\n")  # the cache depends on the content
    again = pipeline(tiny, folder, agent="math", prompt=str(file))
    assert prompts_of(again)[0] == chat("Q: 1 + 1?")
    assert prompts_of(pipeline(tiny, folder))[1] == chat(RULES + "2 + 2?")  # no agent is trained


def test_a_row_that_cannot_be_asked_is_named_with_file_and_line(pipeline, data_dir, tiny):
    folder = data_dir([ROWS[0], {"instruction": RULES + "x\nTask: 1?", "output": SAID}], name="rows.jsonl")
    with pytest.raises(DataError, match=r"rows.jsonl:2 .*2 lines that begin with .*prompt=row"):
        pipeline(tiny, folder, agent="math")


def test_the_models_folder_gets_the_record_and_a_model_of_another_prompt_is_refused(tmp_path):
    counter = PromptCounter(RowPrompts(PromptSource.load("row"), "math"))
    as_is, other = PromptState.AS_IS, PromptState.OTHER
    for user, state in ((RULES + "1?", as_is), (RULES + "2?", as_is), ("Hi?", other)):
        counter.add({**aligned(user), ASKED_COLUMN: state})
    counts = counter.counts()
    assert str(counts) == "2 rows with their own prompts, 1 chat unchanged"
    model = SimpleNamespace(model_name_or_path=str(tmp_path / "base"))
    arguments, unchecked = (
        SimpleNamespace(model=model, sft=SftSettings(agent="math", prompt_check=check))
        for check in (True, False)
    )
    keep_record(counts.record, arguments, tmp_path / "out")
    record = record_of_model(tmp_path / "out")
    assert record == counts.record
    assert [(one.user, one.rows) for one in record.templates] == [(RULES + "{question}", 2)]
    (tmp_path / "out").rename(tmp_path / "base")
    own = PromptCounter(RowPrompts(PromptSource(), "math"))
    own.add({**aligned(MATH.user_message("1?")), ASKED_COLUMN: PromptState.AS_IS})
    with pytest.raises(ConfigError, match=r"base was trained with another prompt: .*prompt_check=off"):
        keep_record(own.counts().record, arguments, tmp_path / "second")
    assert not (tmp_path / "second").exists()
    keep_record(own.counts().record, unchecked, tmp_path / "second")
    assert record_of_model(tmp_path / "second").the_one == PromptTemplate.of_agent(MATH)
