"""All layouts of rows in LLaMA-Factory's own pipeline."""

import json
from pathlib import Path

import pytest
from sft_rows import SEEN, bad_rows

from afm.agents import load_agent
from afm.errors import DataError
from afm.trajectory.record import Record
from afm.trajectory.tags import Author, Segment
from llamafactory_patch.conversations import agent_flan_row

PLAN = "<plan>P.</plan><think>T.</think><code>```py\nprint(42)\n```</code>"
SAID = "<reflection>good</reflection><think>T.</think><answer>\\boxed{42}</answer>"


SEGMENTS = ((PLAN, "agent"), (SEEN, "environment"), (SAID, "agent"))


def record(name="a", segments=SEGMENTS, *, agent_name="math", **fields):
    parts = tuple(Segment(Author(author), text) for text, author in segments)
    made = Record(id=name, agent=agent_name, agent_digest="d", question=f"{name}?", segments=parts, **fields)
    return json.loads(made.model_dump_json())


@pytest.mark.slow
def test_trajectories_are_trained_on_as_they_are(pipeline, data_dir, model_dir):
    # a number and a text, which one column of a table could not hold
    rows = [record(ground_truth=42), record("b", ground_truth="x", provenance={"team": ["t"]})]
    folder = data_dir(rows, name="rows.jsonl", formatting="trajectory")
    built = pipeline(model_dir, folder)
    assert built.trained() == [f"{PLAN}{SAID}<|im_end|>"] * 2
    asked = load_agent("math").user_message("b?")
    assert built.masked()[1] == f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{SEEN}\n"


def test_trajectories_are_asked_as_the_agent_that_is_trained(pipeline, data_dir, tiny, tmp_path):
    own = tmp_path / "mine.yaml"
    own.write_text("extends: math\nname: math\nprompt: ''\nquestion_format: 'Q {question}'\n", "utf-8")
    folder = data_dir([record(), record("b", agent_name="web")], name="rows.jsonl", formatting="trajectory")
    built = pipeline(tiny, folder, agent=str(own), on_bad_rows="drop")
    assert built.masked() == [f"<|im_start|>user\nQ a?<|im_end|>\n<|im_start|>assistant\n{SEEN}\n"]
    [bad] = bad_rows(folder)
    assert "agent: got a record of 'web', but the agent to train is 'math'" in bad["reason"]


def test_what_a_filter_did_not_keep_is_left_out_and_listed(pipeline, data_dir, tiny, capsys):
    rows = [record(), record("b", kept=False, reason="wrong answer")]
    folder = data_dir(rows, name="rows.jsonl", formatting="trajectory")
    assert len(pipeline(tiny, folder).rows) == 1
    assert "0 left out, and 1 that a filter dropped" in capsys.readouterr().err
    assert [row["reason"] for row in bad_rows(folder)] == ["not kept: wrong answer"]


def test_a_trajectory_against_its_agents_rules_is_named(pipeline, data_dir, tiny):
    forged = ((f"{PLAN}{SEEN}{SAID}", "agent"),)
    rows = [record(), record("b", segments=((SAID, "agent"),)), record("c", segments=forged), {"id": "d"}]
    with pytest.raises(DataError) as caught:
        pipeline(tiny, data_dir(rows, name="rows.jsonl", formatting="trajectory"))
    lines = str(caught.value).splitlines()
    assert [line.split("rows.jsonl:")[1][0] for line in lines] == ["2", "3", "4"]
    assert "record 'b' breaks the rules of agent 'math'" in lines[0]
    assert "record 'c' breaks the rules of agent 'math'" in lines[1]


CITY = {"type": "function", "function": {"name": "weather", "description": "W.", "parameters": {}}}


def call(arguments, **fields):
    function = {"name": "weather", "arguments": json.dumps(arguments, ensure_ascii=False)}
    calls = [{"id": "1", "type": "function", "function": function}]
    return {"role": "assistant", "tool_calls": calls, **fields}


def conversation():
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Köln?"},
        call({"city": "Köln"}, content="I look it up."),
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "assistant", "content": [{"type": "text", "text": "Rain."}]},
    ]


@pytest.mark.slow
def test_tool_calls_are_rendered_as_qwen_writes_them(pipeline, data_dir, qwen):
    rows = [{"messages": conversation(), "tools": [CITY]}]
    built = pipeline(qwen, data_dir(rows, formatting="openai_messages"), template="qwen")
    [row] = built.rows
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert built.trained() == [f"I look it up.\n{call}<|im_end|>Rain.<|im_end|>"]
    whole = built.tokenizer.decode(row["input_ids"])
    assert whole.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert json.dumps(CITY) in whole
    answered = "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
    assert whole.endswith(
        f"<|im_start|>user\nWeather in Köln?<|im_end|>\n<|im_start|>assistant\nI look it up.\n{call}<|im_end|>\n"
        f"{answered}<|im_start|>assistant\nRain.<|im_end|>\n"
    )


def test_reasoning_beside_a_message_is_the_agents_thought(pipeline, data_dir, tiny):
    messages = conversation()
    messages[2]["reasoning_content"] = "Ask the tool."
    messages[4]["reasoning_content"] = "It rains.\n"
    built = pipeline(tiny, data_dir([{"messages": messages, "tools": [CITY]}], formatting="openai_messages"))
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert built.trained() == [
        f"<think>\nAsk the tool.\n</think>\n\nI look it up.\n{call}<|im_end|>"
        "<think>\nIt rains.\n</think>\n\nRain.<|im_end|>"
    ]


def test_a_turn_can_be_left_without_loss(pipeline, data_dir, tiny):
    more = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "Sun."}]
    messages = [*conversation(), *more]
    messages[2]["weight"], messages[4]["loss"] = 0, False
    folder = data_dir([{"messages": messages}], formatting="openai_messages")
    assert pipeline(tiny, folder).trained() == ["Sun.<|im_end|>"]
    folder = data_dir([flagged()], formatting="sharegpt")
    assert pipeline(tiny, folder).trained() == ["b<|im_end|>"]


def flagged():
    turns = [("human", "1"), ("gpt", "a"), ("human", "2"), ("gpt", "b")]
    return {"conversations": [{"from": role, "value": text, "loss": text != "a"} for role, text in turns]}


def test_flags_of_turns_hold_without_the_mask_of_observations(pipeline, data_dir, tiny):
    seen = "b<observation>c</observation>"
    asked = [("user", "1", False), ("assistant", "a", False), ("user", "2", False)]
    turns = flan(*asked, ("assistant", seen, True))
    weighted = [{"role": one["role"], "content": one["content"]} for one in turns]
    weighted[1]["weight"] = 0
    chat = flagged()
    chat["conversations"][3]["value"] = seen
    layouts = {"openai_messages": {"messages": weighted}, "agent_flan": {"conversation": turns}}
    for formatting, row in (layouts | {"sharegpt": chat}).items():
        built = pipeline(tiny, data_dir([row], formatting=formatting), ignore_observation=False)
        assert built.trained() == [f"{seen}<|im_end|>\n"], formatting


def test_rows_with_flags_are_mixed_with_rows_without(pipeline, data_dir, tiny):
    folder = data_dir([{"instruction": "q", "input": "", "output": "d"}])
    (folder / "chat.json").write_text(json.dumps([flagged()]))
    info = json.loads((folder / "dataset_info.json").read_text())
    info["chat"] = {"file_name": "chat.json", "formatting": "sharegpt"}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    built = pipeline(tiny, folder, dataset="rows,chat", ignore_observation=False)
    assert built.trained() == ["d<|im_end|>\n", "b<|im_end|>\n"]


@pytest.mark.slow
def test_in_a_table_a_key_without_a_value_is_none(pipeline, data_dir, qwen):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    def row(arguments, schema):
        tool = {"type": "function", "function": {"name": "w", "parameters": schema}}
        function = {"name": "w", "arguments": arguments}
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        ]
        return {"messages": messages, "tools": [tool]}

    rows = [row({"a": 1}, {"x": "1"}), row({"b": [{"c": 2}, {"d": 3}]}, {"y": "2"})]
    folder = data_dir([], name="rows.parquet", formatting="openai_messages")
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    built = pipeline(qwen, folder, template="qwen")
    call = '<tool_call>\n{"name": "w", "arguments": %s}\n</tool_call><|im_end|>'
    assert built.trained() == [call % '{"a": 1}', call % '{"b": [{"c": 2}, {"d": 3}]}']
    for source, masked in zip(rows, built.masked(), strict=True):
        assert json.dumps(source["tools"][0]) in masked


TOOLS = '[{"name": "w", "description": "W.", "parameters": {"type": "object", "properties": {}}}]'


@pytest.mark.parametrize("given", [TOOLS, json.loads(TOOLS)])
def test_tools_may_be_given_as_text_or_as_objects(pipeline, data_dir, qwen, given):
    call = '{"name": "w", "arguments": {}}'
    turns = [("human", "q"), ("function_call", call), ("observation", "rain"), ("gpt", "Rain.")]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns], "tools": given}
    columns = {"messages": "conversations", "tools": "tools"}
    built = pipeline(qwen, data_dir([row], formatting="sharegpt", columns=columns), template="qwen")
    assert built.trained() == [f"<tool_call>\n{call}\n</tool_call><|im_end|>Rain.<|im_end|>"]
    assert json.dumps(json.loads(TOOLS)[0]) in built.masked()[0]


def test_wrong_tool_calls_are_named(pipeline, data_dir, tiny):
    changes = [
        (2, {"role": "assistant", "tool_calls": [{"function": {"name": "w", "arguments": "{"}}]}),
        (4, {"role": "tool", "content": "more"}),
        (1, {"role": "robot", "content": "x"}),
        (1, {"role": "user", "content": None}),
        (4, {"role": "assistant", "content": "x", "function_call": {"name": "w", "arguments": "{}"}}),
        (2, {"role": "assistant", "content": "no call"}),
        (4, {"role": "assistant", "content": "x", "weight": 0.5}),
        (4, {"role": "assistant", "content": "x", "reasoning_content": 7}),
        (4, {"role": "assistant", "content": "<think>b</think>c", "reasoning_content": "a"}),
    ]
    tools = [5, "["]
    rows = [{"messages": [*conversation()[:at], one, *conversation()[at + 1 :]]} for at, one in changes]
    rows += [{"messages": conversation(), "tools": one} for one in tools]
    folder = data_dir(rows, formatting="openai_messages")
    with pytest.raises(DataError, match="arguments of 'w' are not JSON"):
        pipeline(tiny, folder)
    faults = [row["reason"] for row in bad_rows(folder)]
    assert faults[0].startswith("messages[2]: tool_calls: arguments of 'w' are not JSON")
    assert faults[1:] == [
        "messages: the last message is 'tool''s, expected the assistant's",
        "messages[1]: role: got 'robot', expected one of system, developer, user, assistant, tool",
        "messages[1]: content: got null, expected a text",
        "messages[4]: function_call: expected tool_calls, which replaced it",
        "messages[3]: a tool result without a call before it",
        "messages[4]: weight: got 0.5, expected 0 or 1",
        "messages[4]: reasoning_content: got number, expected a text",
        "messages[4]: reasoning_content: the content also contains '<think>', with which the template marks thoughts",
        "tools: got 5, expected a list of objects",
        "tools: invalid JSON: Expecting value: line 1 column 2 (char 1)",
    ]


def flan(*turns):
    return [{"role": role, "content": text, "loss": loss} for role, text, loss in turns]


FLAN = [
    ("system", "You have tools.", False),
    ("user", "Buy a cup.", False),
    ("assistant", "Thought: look.", True),
    ("user", "Response: a cup.", False),
    ("assistant", "Action: none", False),
    ("user", "And now?", False),
    ("assistant", "Answer: bought.", True),
]


def test_agent_flan_is_written_in_its_protocol_and_trained_by_its_flags(pipeline, data_dir, tiny):
    folder = data_dir([{"id": "1", "conversation": flan(*FLAN)}], name="rows.jsonl", formatting="agent_flan")
    built = pipeline(tiny, folder, template="agent_flan", resize_vocab=True)
    [row] = built.rows
    human, assistant, end = "<|Human|>\u0d46", "<|Assistant|>\u0d46", "\u0d3f\n "
    assert built.tokenizer.decode(row["input_ids"]) == (
        f"{human}You have tools.\n {human}Buy a cup.\n {assistant}Thought: look.{end}"
        f"{human}Response: a cup.\n {assistant}Action: none{end}"
        f"{human}And now?\n {assistant}Answer: bought.{end}"
    )
    assert built.trained() == ["Thought: look.\u0d3fAnswer: bought.\u0d3f"]


def test_two_turns_of_the_user_read_as_the_protocol_writes_them():
    turns = flan(("user", "a", False), ("user", "b", False), ("assistant", "c", True))
    row = {"conversation": turns}
    assert agent_flan_row(row, "messages", "agent_flan")["_prompt"][0]["content"] == "a\n <|Human|>\u0d46b"
    assert agent_flan_row(row, "messages", "qwen")["_prompt"][0]["content"] == "a\n\nb"


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([("user", "a", True), ("assistant", "b", True)], "set on a turn of the user"),
        ([("user", "a", False), ("tool", "b", False)], "got 'tool', expected system, user or assistant"),
        ([("user", "a", False), ("assistant", "b", 1)], "loss: got 1, expected true or false"),
        ([("user", "a", False)], "the user's first and the assistant's last"),
        ([("user", "a", False), *[("assistant", "b", True)] * 2], "2 consecutive turns of the assistant"),
    ],
)
def test_wrong_turns_of_agent_flan_are_refused(turns, message):
    with pytest.raises(DataError, match=message):
        agent_flan_row({"conversation": flan(*turns)}, "messages", "agent_flan")


def test_splits_are_mixed_in_the_ratios_asked_for(pipeline, data_dir, tiny):
    folder = data_dir([])
    info = {}
    for name in ("one", "two"):
        turns = flan(("user", "q", False), ("assistant", name, True))
        (folder / f"{name}.jsonl").write_text((json.dumps({"conversation": turns}) + "\n") * 300)
        info[name] = {"file_name": f"{name}.jsonl", "formatting": "agent_flan"}
    info["two"]["num_samples"] = 50
    (folder / "dataset_info.json").write_text(json.dumps(info))
    options = {"dataset": "one,two", "template": "agent_flan", "resize_vocab": True}
    trained = pipeline(tiny, folder, **options).trained()
    assert [sum(name in text for text in trained) for name in info] == [300, 50]
    del info["two"]["num_samples"]
    (folder / "dataset_info.json").write_text(json.dumps(info))
    mixed = {"mix_strategy": "interleave_under", "interleave_probs": "0.9,0.1"}
    trained = pipeline(tiny, folder, **options, **mixed).trained()
    assert sum("one" in text for text in trained) / len(trained) == pytest.approx(0.9, abs=0.05)


def test_the_published_data_sets_are_registered():
    pytest.importorskip("llamafactory")
    from llamafactory.data.parser import get_dataset_list

    splits = [
        "agent_instruct_react",
        "agent_instruct_tflan",
        "toolbench_instruct_j1s1_3k",
        "toolbench_negative",
    ]
    splits += ["toolbench_react_10p", "toolbench_tflan_60p_r10r5u7", "toolbench_tflan_cot_30p"]
    names = ["web_agent_sft", "mhqa_agent_sft", "code_agent_sft", *splits]
    found = get_dataset_list(names, str(Path(__file__).parents[2] / "data"))
    ours = [f"PersonalAILab/AFM-{name}-SFT-Dataset" for name in ("WebAgent", "MHQA-Agent", "CodeAgent")]
    assert [attr.dataset_name for attr in found] == ours + ["internlm/Agent-FLAN"] * len(splits)
    assert {(attr.formatting, attr.messages) for attr in found[3:]} == {("agent_flan", "conversation")}
    assert [attr.split for attr in found[3:]] == splits
