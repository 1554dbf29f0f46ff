"""Rows that others wrote, in each format, as trajectories; expected texts by hand."""

from __future__ import annotations

import json

import pytest

from afm.agents import load_agent
from afm.errors import DataError
from afm.trajectory.convert import FORMATS, Context, detected, read_converted

SPEC = load_agent("mhqa")
CALL = "<think>Look.</think><wiki_search>mill</wiki_search>"
TEXT = f"{CALL}\n<observation>\nBuilt in 1702.\n</observation>\n<think>Found.</think><answer>1702</answer>"
FUNCTION = {"name": "wiki_search", "arguments": '{"query": "mill"}'}
ROWS = {
    "alpaca": {"instruction": "When?", "input": "", "output": TEXT},
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "When?"},
            {"from": "gpt", "value": "Look."},
            {
                "from": "function_call",
                "value": json.dumps({"name": "wiki_search", "arguments": {"query": "mill"}}),
            },
            {"from": "observation", "value": "Built in 1702."},
            {"from": "gpt", "value": "<think>Found.</think><answer>1702</answer>"},
        ]
    },
    "openai": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "en?"}]},
            {"role": "assistant", "content": "Look.", "tool_calls": [{"id": "c", "function": FUNCTION}]},
            {"role": "tool", "tool_call_id": "c", "content": "Built in 1702."},
            {"role": "assistant", "content": "<think>Found.</think><answer>1702</answer>"},
        ]
    },
    "messages": [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": CALL},
        {"role": "user", "content": "Observation: Built in 1702."},
        {"role": "assistant", "content": "Thought: Found.\nFinal Answer: 1702"},
    ],
    "react": {
        "question": "When?",
        "text": "Thought: Look.\nAction: wiki_search\nAction Input: mill\nObservation: Built in 1702.\n"
        "Thought: Found.\nFinal Answer: 1702",
    },
    "agent_flan": {
        "id": 7,
        "conversation": [
            {"role": "user", "content": "When?", "loss": False},
            {
                "role": "assistant",
                "content": 'Thought: Look.\nAction: wiki_search\nAction Input: {"query": "mill"}',
                "loss": True,
            },
            {"role": "user", "content": "Observation: Built in 1702.", "loss": False},
            {"role": "assistant", "content": "Thought: Found.\nFinal Answer: 1702", "loss": True},
        ],
    },
    "smolagents": {
        "steps": [
            {"task": "When?", "task_images": None},
            {
                "step_number": 1,
                "model_output": "Look.",
                "tool_calls": [
                    {
                        "id": "1",
                        "type": "function",
                        "function": {"name": "wiki_search", "arguments": {"query": "mill"}},
                    }
                ],
                "observations": "Built in 1702.",
                "error": None,
            },
            {
                "step_number": 2,
                "model_output": "Found.",
                "tool_calls": [{"name": "final_answer", "arguments": {"answer": "1702"}, "id": "2"}],
                "observations": "1702",
            },
        ]
    },
}


def span(second, data, **changed):
    return {
        "object": "trace.span",
        "trace_id": "t",
        "started_at": f"{second:02}",
        "span_data": data,
        **changed,
    }


def generation(second, sent, said, query=None, **changed):
    """A generation of a trace: what the model was sent, what it said, and what it looked up."""
    calls = {"tool_calls": [{"id": "c", "function": FUNCTION | {"arguments": json.dumps({"query": query})}}]}
    message = {"role": "assistant", "content": said, **(calls if query else {})}
    return span(second, {"type": "generation", "input": sent, "output": [message]}, **changed)


def looked_up(second, query, result, **changed):
    asked = json.dumps({"query": query})
    data = {"type": "function", "name": "wiki_search", "input": asked, "output": result}
    return span(second, data, **changed)


def asked(*texts):
    return [{"role": "user", "content": text} for text in texts]


SPANS = [
    {"object": "trace", "id": "trace_1", "workflow_name": "team"},
    generation(
        1,
        [{"role": "system", "content": "Be good."}, *asked("When?")],
        "Look.",
        "mill",
        trace_id="trace_1",
        id="s1",
    ),
    generation(3, None, "<think>Found.</think><answer>1702</answer>", trace_id="trace_1", id="s3"),
    looked_up(2, "mill", "Built in 1702.", trace_id="trace_1", id="s2"),
]
SPANS[1]["span_data"] |= {"model": "tiny", "usage": {"input_tokens": 30, "output_tokens": 4}}


def read(name, row, **options):
    return FORMATS[name].read(row, Context(agent=SPEC, **options))


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_row_of_each_format_becomes_the_same_trajectory(name):
    found = read(name, ROWS[name]).record
    assert found.text == TEXT
    assert found.question == "When?"
    assert found.kept, found.reason
    assert [segment.author.value for segment in found.segments] == ["agent", "environment", "agent"]
    assert found.cost.tool_calls == 1  # what `afm data stats` counts


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_format_is_known_by_its_first_row(name, tmp_path):
    one, many = tmp_path / "one.json", tmp_path / "many.jsonl"
    one.write_text(json.dumps(ROWS[name], indent=1))
    many.write_text(f"{json.dumps(ROWS[name])}\n\n{json.dumps(ROWS[name])}\n")
    assert detected(one).name == detected(many).name == name
    assert [line for line, _ in read_converted(one, FORMATS[name], Context(agent=SPEC))] == [1]
    rows = list(read_converted(many, FORMATS[name], Context(agent=SPEC)))
    assert [line for line, _ in rows] == [1, 3]
    assert all(row.record.text == TEXT for _, row in rows)


def test_a_bare_list_of_steps_in_a_file_is_one_run(tmp_path):
    (tmp_path / "steps.json").write_text(json.dumps(ROWS["smolagents"]["steps"], indent=1))
    assert detected(tmp_path / "steps.json").name == "smolagents"
    [(_, found)] = read_converted(tmp_path / "steps.json", FORMATS["smolagents"], Context(agent=SPEC))
    assert found.record.text == TEXT


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_the_spans_of_a_trace_may_stand_in_any_order(order):
    assert read("openai_agents", [SPANS[place] for place in order]).record.text == TEXT


def test_the_spans_of_a_trace_become_one_trajectory_wherever_they_stand(tmp_path):
    other = [span | {"trace_id": "trace_2", "id": span["id"].replace("trace_1", "trace_2")} for span in SPANS]
    mixed = [row for pair in zip(SPANS, other, strict=True) for row in pair]
    (tmp_path / "traces.jsonl").write_text("\n".join(map(json.dumps, mixed)))
    assert detected(tmp_path / "traces.jsonl").name == "openai_agents"
    found = list(read_converted(tmp_path / "traces.jsonl", FORMATS["openai_agents"], Context(agent=SPEC)))
    assert [(line, row.record.id, row.record.text) for line, row in found] == [
        (1, "trace_1", TEXT),
        (2, "trace_2", TEXT),
    ]
    first = found[0][1]
    assert (first.record.model, first.record.cost.prompt_tokens, first.record.cost.agent_tokens) == (
        "tiny",
        30,
        4,
    )
    assert first.lost == ("the system prompt",)


def test_a_trace_whose_words_were_not_exported_is_refused():
    spans = [{"object": "trace.span", "trace_id": "t", "span_data": {"type": "response", "response_id": "r"}}]
    with pytest.raises(DataError, match="no generation span; `response` spans hold no words"):
        read("openai_agents", spans)


ANSWERED = {"name": "Finish", "arguments": json.dumps({"return_type": "give_answer", "final_answer": "1702"})}
TOOLBENCH = [
    {"role": "system", "content": "You are AutoGPT."},
    {"role": "user", "content": "When?"},
    {
        "role": "assistant",
        "content": "Look.",
        "function_call": {"name": "wiki_search", "arguments": '{"query": "mill"}'},
    },
    {"role": "function", "name": "wiki_search", "content": "1702"},
    {"role": "assistant", "content": "Found.", "function_call": ANSWERED},
    {
        "role": "function",
        "name": "Finish",
        "content": '{"response": "successfully giving the final answer."}',
    },
]
REACT = "Thought: {}\nAction: {}\nAction Input: {}"


@pytest.mark.parametrize("name", ["openai", "messages", "sharegpt"])
def test_toolbench_is_read_as_it_calls_functions(name):
    react = [
        {"from": "system", "value": "You are AutoGPT."},
        {"from": "user", "value": "When?"},
        {"from": "assistant", "value": REACT.format("Look.", "wiki_search", '{\n"query": "mill"\n}')},
        {"from": "function", "value": "1702"},
        {"from": "assistant", "value": REACT.format("Found.", "Finish", ANSWERED["arguments"])},
    ]
    rows = {"openai": {"messages": TOOLBENCH}, "messages": TOOLBENCH, "sharegpt": {"conversations": react}}
    found = read(name, rows[name])
    assert found.record.text == (
        "<think>Look.</think><wiki_search>mill</wiki_search>\n<observation>\n1702\n</observation>\n"
        "<think>Found.</think><answer>1702</answer>"
    )
    assert found.record.kept, found.record.reason
    assert found.lost == ("the system prompt",)


@pytest.mark.parametrize(
    ("place", "changed", "fault"),
    [
        (3, {"name": "browse"}, r"messages\[3\]: name: got 'browse', expected that of a call before it"),
        (
            4,
            {"function_call": {"name": "Finish", "arguments": '{"return_type": "give_up_and_restart"}'}},
            r"messages\[4\]: Finish: got .*give_up_and_restart.*; the run gave up",
        ),
        (2, {"function_call": {"name": "wiki_search", "arguments": "{"}}, r"messages\[2\]: .* are no JSON"),
        (2, {"function_call": "wiki_search"}, r"messages\[2\]: tool_calls: got .*wiki_search"),
    ],
)
def test_functions_that_fit_nothing_refuse_the_row(place, changed, fault):
    messages = [*TOOLBENCH[:place], TOOLBENCH[place] | changed, *TOOLBENCH[place + 1 :]]
    with pytest.raises(DataError, match=fault):
        read("openai", {"messages": messages})


def test_a_trace_in_which_the_user_asks_again_is_refused():
    spans = [
        generation(1, asked("When?"), "Look.", "mill"),
        looked_up(2, "mill", "1702"),
        generation(3, asked("When?"), "1702"),
        generation(
            4, [*asked("When?"), {"role": "assistant", "content": "1702"}, *asked("And who?")], "Look.", "who"
        ),
        looked_up(5, "who", "Ann"),
        generation(6, [], "Ann"),
    ]
    with pytest.raises(
        DataError, match=r"span 3: got a second message of the user, 'And who\?', .*one question a row"
    ):
        read("openai_agents", spans)
    assert read("openai_agents", spans[:3]).record.text.endswith("<answer>1702</answer>")
    spans[1]["error"] = {"message": "late"}
    assert [call.ok for call in read("openai_agents", spans[:3]).record.calls] == [False]


def test_a_tool_that_ran_with_other_arguments_than_the_model_wrote_refuses_the_trace():
    spans = [generation(1, asked("When?"), "Look.", "mill"), looked_up(2, "a mill", "1702")]
    last = generation(3, asked("When?"), "1702")
    with pytest.raises(
        DataError, match=r"span 1: wiki_search ran with .*a mill.*, which no generation asked for"
    ):
        read("openai_agents", [*spans, last])
    spans[1]["span_data"]["input"] = None  # a trace without sensitive data
    assert "1702\n</observation>" in read("openai_agents", [*spans, last]).record.text


def test_a_trace_that_begins_in_the_middle_of_a_chat_is_refused():
    sent = [*asked("Hi."), {"role": "assistant", "content": "The mill is from 1702."}, *asked("When?")]
    with pytest.raises(DataError, match="span 0: the first generation was sent 1 messages of the assistant"):
        read("openai_agents", [generation(1, sent, "1702")])


def test_an_agent_that_is_called_as_a_tool_is_asked_something_else():
    """Its spans lie below those of the function; their words are thoughts of the team."""
    spans = [
        generation(1, asked("When?"), "Look.", "mill", id="a"),
        looked_up(2, "mill", "1702", id="b"),
        span(3, {"type": "agent"}, id="c", parent_id="b"),
        generation(4, asked("mill"), "In the book.", id="d", parent_id="c"),
        generation(5, asked("When?"), "1702", id="e"),
    ]
    assert read("openai_agents", spans).record.text == (
        "<think>Look.</think><wiki_search>mill</wiki_search>\n<observation>\n1702\n</observation>\n"
        "<think>In the book.</think><answer>1702</answer>"
    )


@pytest.mark.parametrize("sent", ["When?", "Is this polite: When?"])
def test_the_agent_of_a_guardrail_takes_no_part(sent):
    spans = [
        span(1, {"type": "guardrail", "name": "polite"}, id="g"),
        generation(1, asked(sent), '{"ok": true}', id="h", parent_id="g"),
        generation(2, asked("When?"), "Look.", "mill", id="a"),
        looked_up(3, "mill", "1702", id="b"),
        generation(4, asked("When?"), "1702", id="c"),
    ]
    found = read("openai_agents", spans)
    assert found.record.text == (
        "<think>Look.</think><wiki_search>mill</wiki_search>\n<observation>\n1702\n</observation>\n"
        "<answer>1702</answer>"
    )
    assert found.lost == ("guardrail spans",)


def test_a_result_goes_to_the_call_whose_identity_it_bears():
    def row(*identities, named=("a", "b")):
        calls = [
            {"id": name, "function": FUNCTION | {"arguments": json.dumps({"query": query})}}
            for name, query in zip(named, ("mill", "bridge"), strict=True)
        ]
        results = [
            {"role": "tool", "tool_call_id": name, "content": f"result {number}"}
            for number, name in enumerate(identities, 1)
        ]
        called = {"role": "assistant", "content": "Look.", "tool_calls": calls}
        return {"messages": [*asked("When?"), called, *results, {"role": "assistant", "content": "1702"}]}

    def results(*identities, **named):
        return [call.observation for call in read("openai", row(*identities, **named)).record.calls]

    assert results("b", "a") == ["result 2", "result 1"]
    assert results(None, None) == ["result 1", "result 2"]
    assert results("x", "y", named=(None, None)) == ["result 1", "result 2"]
    assert results("a", "a", named=("a", "a")) == ["result 1", "result 2"]
    for wrong in (("a", "ZZZ"), ("a", "a")):
        with pytest.raises(
            DataError, match=rf"messages\[3\]: tool_call_id: got '{wrong[1]}', .* the last calls are 'a', 'b'"
        ):
            read("openai", row(*wrong))


def test_an_instruction_before_the_question_is_taken_off_only_if_it_is_the_agents():
    row = ROWS["alpaca"] | {"instruction": SPEC.user_message("When?")}
    assert read("alpaca", row).record.question == "When?"
    assert read("alpaca", row | {"instruction": "Please: When?"}).record.question == "Please: When?"


def test_other_names_of_tools_are_told_and_calls_can_be_left_out():
    text = json.dumps(ROWS["openai"]).replace("wiki_search", "look_up")
    with pytest.raises(DataError, match="tool 'look_up' is none of agent 'mhqa'"):
        read("openai", json.loads(text))
    assert read("openai", json.loads(text), tools={"look_up": "wiki_search"}).record.text == TEXT
    left_out = read("openai", json.loads(text), tools={"look_up": ""}).record
    assert left_out.calls == ()
    assert left_out.reason.startswith("format: ")


def test_a_react_trace_with_brackets_and_numbers_is_read():
    text = "Thought 1: Look.\nAction 1: wiki_search[mill]\nObservation 1: Built in 1702.\nThought 2: Found.\nAction 2: Finish[1702]"
    assert read("react", {"question": "When?", "text": text}).record.text == TEXT


def test_an_error_of_a_smolagents_step_is_what_came_back():
    steps = json.loads(json.dumps(ROWS["smolagents"]["steps"]))
    steps[1] |= {
        "observations": None,
        "error": {"type": "AgentToolExecutionError", "message": "no such page"},
    }
    assert "\nError: no such page\n" in read("smolagents", steps).record.text


def test_the_log_of_a_benchmark_as_oagents_writes_it_is_read():
    steps = [step | {"step_type": "action"} for step in ROWS["smolagents"]["steps"][1:]]
    row = {
        "agent_name": "big",
        "question": "When?",
        "augmented_question": "You have a question to answer. When?",
        "prediction": "1702",
        "true_answer": "1702",
        "intermediate_steps": [{"task": "You have a question to answer. When?", "step_type": "task"}, *steps],
        "task": "2",
        "task_id": "c61d",
        "search_agent_actions": [["visit"]],
    }
    found = read("smolagents", row)
    assert FORMATS["smolagents"].known(row)
    assert (found.record.question, found.record.text) == ("When?", TEXT)
    assert (found.record.id, found.record.ground_truth, found.record.model) == ("c61d", "1702", "big")
    assert found.lost == ("key 'search_agent_actions', the work of a managed agent",)
    with pytest.raises(DataError, match=r"steps written with str\(\) cannot be read"):
        read("smolagents", row | {"intermediate_steps": ["ActionStep(...)"]})


def test_what_is_left_behind_is_told():
    row = ROWS["openai"] | {
        "messages": [{"role": "system", "content": "Be good."}, *ROWS["openai"]["messages"]],
        "score": 3,
    }
    assert read("openai", row).lost == ("the system prompt", "key 'score'")


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("alpaca", {"instruction": "x"}, "no key 'output'"),
        ("alpaca", 3, "got int, expected an object"),
        ("openai", {"messages": []}, "messages: got"),
        ("openai", {"messages": [{"role": "assistant", "content": "x"}]}, "speaks before a question"),
        (
            "openai",
            {"messages": [*ROWS["openai"]["messages"][:2], {"role": "tool", "content": 3}]},
            r"messages\[2\]: content: got int",
        ),
        ("openai", {"messages": ROWS["openai"]["messages"][:2]}, "the call of 'wiki_search' has no result"),
        (
            "openai",
            {"messages": [*ROWS["openai"]["messages"][:3], {"role": "user", "content": "And now?"}]},
            r"messages\[3\]: got a second message of the user, 'And now\?', that answers no tool call; expected one question a row",
        ),
        (
            "openai",
            {
                "messages": [
                    {"role": "user", "content": "Who built it?"},
                    {"role": "assistant", "content": "Anna Berg."},
                    {"role": "user", "content": "And when, " + "x" * 100},
                    {"role": "assistant", "content": "1702."},
                ]
            },
            rf"got a second message of the user, 'And when, {'x' * 50}\.\.\.', .*Make a row of each question",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "robot", "value": "x"}]},
            "got 'robot', expected one of system",
        ),
        ("react", {"question": "x", "text": "no trace"}, "holds no Thought:"),
        ("smolagents", {"steps": [{"step_number": 1, "model_output": "x"}]}, "holds no task"),
        (
            "smolagents",
            [{"task": "x"}, {"step_number": 1, "tool_calls": [FUNCTION, FUNCTION], "observations": "both"}],
            "step 1: the results of 2 tool calls stand in one text",
        ),
        ("agent_flan", {"conversation": "x"}, "conversation: got 'x'"),
        ("coa", {"segments": 3}, "id: "),
    ],
)
def test_a_bad_row_says_what_is_wrong_with_it(name, row, message):
    with pytest.raises(DataError, match=message):
        read(name, row)


def test_without_an_agent_a_row_that_names_none_is_refused():
    with pytest.raises(DataError, match="names no agent; give --agent NAME"):
        FORMATS["openai"].read(ROWS["openai"], Context())


ENDLESS = "[" * 100_000


def test_a_call_that_opens_brackets_for_ever_is_a_bad_row():
    turns = [{"from": "human", "value": "q?"}, {"from": "function_call", "value": ENDLESS}]
    with pytest.raises(DataError, match="no JSON"):
        read("sharegpt", {"conversations": turns})


def test_an_action_that_opens_brackets_for_ever_is_a_text():
    text = f"Thought: I look.\nAction: wiki_search\nAction Input: {ENDLESS}\nObservation: x\nFinal Answer: 7"
    found = read("react", {"question": "q?", "text": text}).record
    assert ENDLESS in json.dumps(found.model_dump(mode="json"))
