"""Rows that others wrote, in each format, as trajectories; expected texts by hand."""

import json
from pathlib import Path

import pytest

from afm.agents import load_agent
from afm.errors import DataError
from afm.trajectory.convert import FORMATS, Context, detected, read_converted

SPEC = load_agent("mhqa")
CALL = "<think>Look.</think><wiki_search>mill</wiki_search>"
SEEN = "\n<observation>\n{}\n</observation>\n"
TEXT = f"{CALL}{SEEN.format('Built in 1702.')}<think>Found.</think><answer>1702</answer>"
FOUND = "<think>Found.</think><answer>1702</answer>"
QUERY = {"query": "mill"}
FUNCTION = {"name": "wiki_search", "arguments": json.dumps(QUERY)}


def turns(*pairs, role="role", words="content"):
    """Messages of (role, text)."""
    return [{role: speaker, words: text} for speaker, text in pairs]


USER, ASSISTANT = "user", "assistant"
REACT = "Thought: {}\nAction: {}\nAction Input: {}"
ROWS = {
    "alpaca": {"instruction": "When?", "input": "", "output": TEXT},
    "sharegpt": {
        "conversations": turns(
            ("human", "When?"),
            ("gpt", "Look."),
            ("function_call", json.dumps({"name": "wiki_search", "arguments": QUERY})),
            ("observation", "Built in 1702."),
            ("gpt", FOUND),
            role="from",
            words="value",
        )
    },
    "openai": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "en?"}]},
            {"role": "assistant", "content": "Look.", "tool_calls": [{"id": "c", "function": FUNCTION}]},
            {"role": "tool", "tool_call_id": "c", "content": "Built in 1702."},
            {"role": "assistant", "content": FOUND},
        ]
    },
    "messages": turns(
        (USER, "When?"),
        (ASSISTANT, CALL),
        (USER, "Observation: Built in 1702."),
        (ASSISTANT, "Thought: Found.\nFinal Answer: 1702"),
    ),
    "react": {
        "question": "When?",
        "text": f"{REACT.format('Look.', 'wiki_search', 'mill')}\nObservation: Built in 1702.\n"
        "Thought: Found.\nFinal Answer: 1702",
    },
    "agent_flan": {
        "id": 7,
        "conversation": turns(
            (USER, "When?"),
            (ASSISTANT, REACT.format("Look.", "wiki_search", json.dumps(QUERY))),
            (USER, "Observation: Built in 1702."),
            (ASSISTANT, "Thought: Found.\nFinal Answer: 1702"),
        ),
    },
    "smolagents": {
        "steps": [
            {"task": "When?", "task_images": None},
            {
                "step_number": 1,
                "model_output": "Look.",
                "tool_calls": [{"id": "1", "function": {"name": "wiki_search", "arguments": QUERY}}],
                "observations": "Built in 1702.",
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
    start = {"object": "trace.span", "trace_id": "t", "started_at": f"{second:02}", "span_data": data}
    return start | changed


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
    return turns(*((USER, text) for text in texts))


SPANS = [
    {"object": "trace", "id": "t", "workflow_name": "team"},
    generation(1, [{"role": "system", "content": "Be good."}, *asked("When?")], "Look.", "mill", id="s1"),
    generation(3, None, FOUND, id="s3"),
    looked_up(2, "mill", "Built in 1702.", id="s2"),
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
    other = [span | ({"trace_id": "t2"} if "trace_id" in span else {"id": "t2"}) for span in SPANS]
    mixed = [row for pair in zip(SPANS, other, strict=True) for row in pair]
    (tmp_path / "traces.jsonl").write_text("\n".join(map(json.dumps, mixed)))
    assert detected(tmp_path / "traces.jsonl").name == "openai_agents"
    found = list(read_converted(tmp_path / "traces.jsonl", FORMATS["openai_agents"], Context(agent=SPEC)))
    read_back = [(line, row.record.id, row.record.text) for line, row in found]
    assert read_back == [(1, "t", TEXT), (2, "t2", TEXT)]
    first = found[0][1]
    assert first.record.model == "tiny"
    assert (first.record.cost.prompt_tokens, first.record.cost.agent_tokens) == (30, 4)
    assert first.lost == ("the system prompt",)


def test_a_trace_whose_words_were_not_exported_is_refused():
    spans = [{"object": "trace.span", "trace_id": "t", "span_data": {"type": "response", "response_id": "r"}}]
    with pytest.raises(DataError, match="span 0: `response` spans hold no text"):
        read("openai_agents", spans)
    with pytest.raises(DataError, match="span r: `response` spans hold no text"):
        read("openai_agents", [*SPANS, span(4, {"type": "response", "response_id": "r"}, id="r")])
    failed = span(0, {"type": "response", "response_id": None}, error={"message": "timeout"})
    assert read("openai_agents", [failed, *SPANS]).record.text == TEXT
    with pytest.raises(DataError, match="no generation span and no response span"):
        read("openai_agents", [span(1, {"type": "agent", "name": "a"})])


def response(second, sent, *items, instructions=None, **changed):
    """A span of the SDK's default model, with what a trace processor added to it."""
    answered = {"id": "r", "object": "response", "model": "tiny", "output": list(items)}
    answered["instructions"] = instructions
    usage = {"requests": 1, "input_tokens": 30, "output_tokens": 4}
    data = {"type": "response", "response_id": "r", "usage": usage, "input": sent, "response": answered}
    return span(second, data, **changed)


def words(text):
    part = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
    return {"id": "m", "content": [part], "role": "assistant", "status": "completed", "type": "message"}


CALL_ITEM = {
    "type": "function_call",
    "id": "f",
    "call_id": "c",
    "name": "wiki_search",
    "arguments": '{"query": "mill"}',
}
RESULT_ITEM = {"type": "function_call_output", "call_id": "c", "output": "Built in 1702."}


@pytest.mark.parametrize("sent", ["When?", [{"role": "user", "content": "When?"}]])
def test_response_spans_with_input_and_response_are_read(sent):
    listed = [{"role": "user", "content": "When?"}, words("Look."), CALL_ITEM, RESULT_ITEM]
    last = response(3, listed, words(FOUND))
    row = [response(1, sent, words("Look."), CALL_ITEM), looked_up(2, "mill", "Built in 1702."), last]
    found = read("openai_agents", row)
    assert found.record.text == TEXT
    assert (found.record.question, found.record.model, found.lost) == ("When?", "tiny", ())
    assert (found.record.cost.prompt_tokens, found.record.cost.agent_tokens) == (60, 8)
    ruled = [response(1, sent, words(FOUND), instructions="Be brief.")]
    assert read("openai_agents", ruled).lost == ("the system prompt",)
    searched = {"type": "web_search_call", "id": "w", "status": "completed"}
    with pytest.raises(DataError, match="got an item of type 'web_search_call'"):
        read("openai_agents", [response(1, sent, searched, CALL_ITEM)])


ANSWERED = {"name": "Finish", "arguments": json.dumps({"return_type": "give_answer", "final_answer": "1702"})}
TOOLBENCH = [
    *turns(("system", "You are AutoGPT."), (USER, "When?")),
    {"role": "assistant", "content": "Look.", "function_call": FUNCTION},
    {"role": "function", "name": "wiki_search", "content": "1702"},
    {"role": "assistant", "content": "Found.", "function_call": ANSWERED},
    {"role": "function", "name": "Finish", "content": '{"response": "successfully giving the answer."}'},
]


LOOKED_UP = f"{CALL}{SEEN.format('1702')}"


@pytest.mark.parametrize("name", ["openai", "messages", "sharegpt"])
def test_toolbench_is_read_as_it_calls_functions(name):
    react = turns(
        ("system", "You are AutoGPT."),
        ("user", "When?"),
        ("assistant", REACT.format("Look.", "wiki_search", '{\n"query": "mill"\n}')),
        ("function", "1702"),
        ("assistant", REACT.format("Found.", "Finish", ANSWERED["arguments"])),
        role="from",
        words="value",
    )
    rows = {"openai": {"messages": TOOLBENCH}, "messages": TOOLBENCH, "sharegpt": {"conversations": react}}
    found = read(name, rows[name])
    assert found.record.text == LOOKED_UP + FOUND
    assert found.record.kept, found.record.reason
    assert found.lost == ("the system prompt",)


GIVES_UP = {"name": "Finish", "arguments": '{"return_type": "give_up_and_restart"}'}


@pytest.mark.parametrize(
    ("place", "changed", "fault"),
    [
        (3, {"name": "browse"}, r"messages\[3\]: name: got 'browse', expected that of an earlier call"),
        (4, {"function_call": GIVES_UP}, r"messages\[4\]: Finish: got .*give_up_.*; the run gave up"),
        (2, {"function_call": FUNCTION | {"arguments": "{"}}, r"messages\[2\]: .* are not JSON"),
        (2, {"function_call": "wiki_search"}, r"messages\[2\]: tool_calls: got .*wiki_search"),
    ],
)
def test_functions_that_fit_nothing_refuse_the_row(place, changed, fault):
    messages = [*TOOLBENCH[:place], TOOLBENCH[place] | changed, *TOOLBENCH[place + 1 :]]
    with pytest.raises(DataError, match=fault):
        read("openai", {"messages": messages})


ONE_CALL = [
    generation(1, asked("When?"), "Look.", "mill", id="a"),
    looked_up(2, "mill", "1702", id="b"),
    generation(6, asked("When?"), "1702", id="e"),
]


def test_a_trace_in_which_the_user_asks_again_is_refused():
    spoken = [*asked("When?"), *turns((ASSISTANT, "1702")), *asked("And who?")]
    again = [generation(7, spoken, "Look.", "who"), looked_up(8, "who", "Ann"), generation(9, [], "Ann")]
    second = r"span 3: got a second message of the user, 'And who\?', .*one question per row"
    with pytest.raises(DataError, match=second):
        read("openai_agents", [*ONE_CALL, *again])
    assert read("openai_agents", ONE_CALL).record.text == f"{LOOKED_UP}<answer>1702</answer>"
    failed = ONE_CALL[1] | {"error": {"message": "late"}}
    found = read("openai_agents", [ONE_CALL[0], failed, ONE_CALL[2]])
    assert [call.ok for call in found.record.calls] == [False]


def test_a_tool_that_ran_with_other_arguments_than_the_model_wrote_refuses_the_trace():
    first, ran, last = ONE_CALL[0], looked_up(2, "a mill", "1702", id="b"), ONE_CALL[2]
    with pytest.raises(DataError, match=r"span b: wiki_search ran with .*a mill.*, which no gener"):
        read("openai_agents", [first, ran, last])
    ran["span_data"]["input"] = None  # a trace without sensitive data
    assert "1702\n</observation>" in read("openai_agents", [first, ran, last]).record.text


def test_a_trace_that_begins_in_the_middle_of_a_chat_is_refused():
    sent = turns((USER, "Hi."), (ASSISTANT, "The mill is from 1702."), (USER, "When?"))
    with pytest.raises(
        DataError, match=r"span 0: the first generation was sent earlier messages of .* \(1\)"
    ):
        read("openai_agents", [generation(1, sent, "1702")])


def test_an_agent_that_is_called_as_a_tool_is_asked_something_else():
    """Its spans lie below those of the function; their words are thoughts of the team."""
    below = [
        span(3, {"type": "agent"}, id="c", parent_id="b"),
        generation(4, asked("mill"), "In the book.", id="d", parent_id="c"),
    ]
    found = read("openai_agents", [*ONE_CALL[:2], *below, ONE_CALL[2]])
    assert found.record.text == f"{LOOKED_UP}<think>In the book.</think><answer>1702</answer>"


@pytest.mark.parametrize(
    ("message", "above", "kept", "stop"),
    [
        ("Max turns exceeded", {}, False, "turns"),
        ("Guardrail tripwire triggered", {}, False, "error"),
        ("Max turns exceeded", {"parent_id": "b"}, True, "answer"),  # an agent called as a tool
    ],
)
def test_a_failed_run_is_not_kept(message, above, kept, stop):
    failed = span(0, {"type": "agent", "name": "a"}, id="c", error={"message": message, "data": {}}, **above)
    last = generation(6, asked("When?"), "<think>So.</think><answer>1702</answer>", id="e")
    record = read("openai_agents", [failed, *ONE_CALL[:2], last]).record
    assert (record.kept, record.stop) == (kept, stop)
    assert record.reason == ("" if kept else f"openai_agents: the run failed: {message}")


@pytest.mark.parametrize("sent", ["When?", "Is this polite: When?"])
def test_the_agent_of_a_guardrail_takes_no_part(sent):
    guard = [
        span(0, {"type": "guardrail", "name": "polite"}, id="g"),
        generation(0, asked(sent), '{"ok": true}', id="h", parent_id="g"),
    ]
    found = read("openai_agents", [*guard, *ONE_CALL])
    assert found.record.text == f"{LOOKED_UP}<answer>1702</answer>"
    assert found.lost == ("guardrail spans",)


def test_a_result_goes_to_the_call_whose_identity_it_bears():
    def results(*identities, named=("a", "b")):
        calls = [{"id": name, "function": FUNCTION} for name in named]
        said = [
            {"role": "tool", "tool_call_id": name, "content": f"result {number}"}
            for number, name in enumerate(identities, 1)
        ]
        called = {"role": "assistant", "content": "Look.", "tool_calls": calls}
        messages = [*asked("When?"), called, *said, *turns((ASSISTANT, "1702"))]
        return [call.observation for call in read("openai", {"messages": messages}).record.calls]

    assert results("b", "a") == ["result 2", "result 1"]
    assert results(None, None) == ["result 1", "result 2"]
    assert results("x", "y", named=(None, None)) == ["result 1", "result 2"]
    assert results("a", "a", named=("a", "a")) == ["result 1", "result 2"]
    for wrong in ("ZZZ", "a"):
        fault = rf"messages\[3\]: tool_call_id: got '{wrong}', .* the last calls are 'a', 'b'"
        with pytest.raises(DataError, match=fault):
            results("a", wrong)


def test_an_instruction_before_the_question_is_taken_off_only_if_it_is_the_agents():
    row = ROWS["alpaca"] | {"instruction": SPEC.user_message("When?")}
    assert read("alpaca", row).record.question == "When?"
    assert read("alpaca", row | {"instruction": "Please: When?"}).record.question == "Please: When?"


def test_other_names_of_tools_are_told_and_calls_can_be_left_out():
    text = json.dumps(ROWS["openai"]).replace("wiki_search", "look_up")
    with pytest.raises(DataError, match=r"agent 'mhqa' has no tool 'look_up'.*afm convert --tool look_up="):
        read("openai", json.loads(text))
    assert read("openai", json.loads(text), tools={"look_up": "wiki_search"}).record.text == TEXT
    left_out = read("openai", json.loads(text), tools={"look_up": ""}).record
    assert left_out.calls == ()
    assert left_out.reason.startswith("format: ")


def test_a_react_trace_with_brackets_and_numbers_is_read():
    looked = "Thought 1: Look.\nAction 1: wiki_search[mill]\nObservation 1: Built in 1702."
    row = {"question": "When?", "text": f"{looked}\nThought 2: Found.\nAction 2: Finish[1702]"}
    assert read("react", row).record.text == TEXT


def test_an_error_of_a_smolagents_step_is_what_came_back():
    task, first, last = ROWS["smolagents"]["steps"]
    failed = first | {"observations": None, "error": {"type": "AgentError", "message": "no page"}}
    assert "\nError: no page\n" in read("smolagents", [task, failed, last]).record.text


@pytest.mark.parametrize(
    ("joined", "results", "reason"),
    [
        ("1702\nnobody", ["1702", "nobody"], ""),
        ("1702\nand a fire\nnobody", ["", ""], "format: <web_search> at character 42"),
        ("1702", ["", ""], "format: <web_search> at character 42"),
    ],
)
def test_parallel_calls_of_smolagents_get_their_results_if_each_is_one_line(joined, results, reason):
    task, first, last = ROWS["smolagents"]["steps"]
    both = first | {"tool_calls": [FUNCTION, FUNCTION], "observations": joined, "model_output": ""}
    context = Context(load_agent("react"), tools={"wiki_search": "web_search"})
    found = FORMATS["smolagents"].read([task, both, last], context)
    assert [call.observation for call in found.record.calls] == results
    assert found.record.reason.startswith(reason)
    lost = ("which of a step's calls gave which part of its result",) if reason else ()
    assert (found.lost, joined in found.record.text) == (lost, bool(reason))
    assert found.record.kept is (not reason)


def test_the_log_of_a_benchmark_as_oagents_writes_it_is_read():
    steps = [step | {"step_type": "action"} for step in ROWS["smolagents"]["steps"][1:]]
    task = {"task": "You have a question to answer. When?", "step_type": "task"}
    row = {"agent_name": "big", "question": "When?", "augmented_question": task["task"], "task": "2"}
    row |= {"prediction": "1702", "true_answer": "1702", "task_id": "c61d"}
    row |= {"intermediate_steps": [task, *steps], "search_agent_actions": [["visit"]]}
    found = read("smolagents", row)
    assert FORMATS["smolagents"].known(row)
    assert (found.record.question, found.record.text) == ("When?", TEXT)
    assert (found.record.id, found.record.ground_truth, found.record.model) == ("c61d", "1702", "big")
    assert found.lost == ("key 'search_agent_actions', the work of a managed agent",)
    with pytest.raises(DataError, match=r"steps written with str\(\) cannot be read"):
        read("smolagents", row | {"intermediate_steps": ["ActionStep(...)"]})


def test_what_is_left_behind_is_told():
    messages = [*turns(("system", "Be good.")), *ROWS["openai"]["messages"]]
    assert read("openai", {"messages": messages, "score": 3}).lost == ("the system prompt", "key 'score'")


SECOND = "got a second message of the user"
CALLED, RETURNED = ROWS["openai"]["messages"][:2], ROWS["openai"]["messages"][:3]
TWO_QUESTIONS = turns((USER, "Who?"), (ASSISTANT, "Anna."), (USER, "And when, " + "x" * 100))
BOTH_FAILED = {
    "step_number": 1,
    "tool_calls": [FUNCTION, FUNCTION],
    "error": {"type": "E", "message": "down"},
}


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("alpaca", {"instruction": "x"}, "no key 'output'"),
        ("alpaca", 3, "got number, expected an object"),
        ("openai", [], "messages: got"),
        ("openai", turns((ASSISTANT, "x")), "before any question of the user"),
        ("openai", [*CALLED, *turns(("tool", 3))], r"messages\[2\]: content: got number"),
        ("openai", CALLED, "the call of 'wiki_search' has no result"),
        (
            "openai",
            [*RETURNED, *asked("And now?")],
            rf"messages\[3\]: {SECOND}, 'And now\?', that answers no",
        ),
        ("openai", [*TWO_QUESTIONS, *turns((ASSISTANT, "1702."))], rf"{SECOND}, 'And when, {'x' * 50}\.\.\."),
        ("messages", ROWS["openai"], "got object, expected a list of messages"),
        ("messages", 3, "got number, expected a list of messages"),
        ("messages", [], "got an empty list, expected a list of messages"),
        ("sharegpt", {"conversations": [{"from": "robot", "value": "x"}]}, "got 'robot', expected one of"),
        ("react", {"question": "x", "text": "no trace"}, "expected `Thought:`"),
        ("smolagents", {"steps": [{"step_number": 1, "model_output": "x"}]}, "holds no task"),
        (
            "smolagents",
            [{"task": "x"}, BOTH_FAILED],
            "step 1: one of 2 tool calls failed, .* --on-bad-rows drop",
        ),
        ("agent_flan", {"conversation": "x"}, "conversation: got 'x'"),
        ("coa", {"segments": 3}, "id: "),
    ],
)
def test_a_bad_row_says_what_is_wrong_with_it(name, row, message):
    with pytest.raises(DataError, match=message):
        read(name, {"messages": row} if name == "openai" else row)


@pytest.mark.parametrize(
    ("tool", "message"), [("wiki_serch", "wiki_search, drop"), ("screenshot", "OURS, drop")]
)
def test_only_a_similar_tool_is_suggested(tool, message):
    text = json.dumps(ROWS["openai"]).replace("wiki_search", tool)
    with pytest.raises(DataError, match=f"rename it with afm convert --tool {tool}={message}"):
        read("openai", json.loads(text))


def test_a_picture_in_a_message_is_named_as_the_cause():
    parts = [{"type": "input_text", "text": "When?"}, {"type": "input_image", "image_url": "data:,"}]
    sent, *rest = ROWS["openai"]["messages"]
    message = (
        "got a part of type 'input_image', expected text parts only; pictures are not read: write a text"
    )
    with pytest.raises(DataError, match=message):
        read("openai", {"messages": [sent | {"content": parts}, *rest]})
    with pytest.raises(DataError, match=message):
        read("openai_agents", [generation(0, [{"role": "user", "content": parts}], "1702", id="e")])


def test_without_an_agent_a_row_that_names_none_is_refused():
    with pytest.raises(DataError, match="names no agent; give --agent NAME"):
        FORMATS["openai"].read(ROWS["openai"], Context())


def atif(first, last):
    """Two steps of the agent, the first with a call."""
    call = {"tool_call_id": "a", "function_name": "wiki_search", "arguments": QUERY}
    observation = {"results": [{"source_call_id": "a", "content": "Built in 1702."}]}
    steps = [
        {"step_id": 1, "source": "user", "message": "When?"},
        {"step_id": 2, "source": "agent", "tool_calls": [call], "observation": observation, **first},
        {"step_id": 3, "source": "agent", **last},
    ]
    agent = {"name": "x", "version": "1"}
    return {"schema_version": "ATIF-v1.6", "session_id": "s", "agent": agent, "steps": steps}


def openai(first, last):
    """The same as two messages of the assistant."""
    sent, called, result, ended = ROWS["openai"]["messages"]
    return {"messages": [sent, called | first, result, ended | last]}


def spans(first, last):
    """The same as two generations of a trace."""
    trace = [generation(1, asked("When?"), "", "mill"), looked_up(2, "mill", "Built in 1702.")]
    trace.append(generation(3, asked("When?"), ""))
    for row, said in ((trace[0], first), (trace[2], last)):
        row["span_data"]["output"][0] |= said
    return trace


def with_reasoning(words, hidden, place="content"):
    return {place: words, "reasoning_content": hidden}


HIDDEN, ALSO = "I should search.", "The page says so."
THOUGHT = TEXT.replace("Look.", HIDDEN).replace("Found.", ALSO)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("openai", openai(with_reasoning("", HIDDEN), with_reasoning("1702", ALSO))),
        ("openai", openai({"content": None, "reasoning": HIDDEN}, {"content": "1702", "reasoning": ALSO})),
        ("openai_agents", spans(with_reasoning("", HIDDEN), with_reasoning("1702", ALSO))),
        ("atif", atif(with_reasoning("", HIDDEN, "message"), with_reasoning("1702", ALSO, "message"))),
        ("atif", atif({"message": f"<think>{HIDDEN}</think>"}, {"message": f"<think>{ALSO}</think>1702"})),
        # The chat template wrote the opening tag.
        ("openai", openai({"content": f"<Thinking>{HIDDEN}</Thinking>"}, {"content": f"{ALSO}</think>1702"})),
    ],
)
def test_hidden_reasoning_is_a_thought_of_its_own_and_nothing_stands_in_for_it(name, row):
    found = read(name, row, missing_thought="I go on.").record
    assert found.text == THOUGHT
    assert found.kept, found.reason


def test_reasoning_before_tags_of_the_agent_joins_the_thought_that_begins_them():
    row = openai(
        with_reasoning("<think>Mill.</think>", HIDDEN), with_reasoning("<answer>1702</answer>", ALSO)
    )
    assert read("openai", row).record.text == THOUGHT.replace("search.<", "search.\n\nMill.<")


def test_tags_in_reasoning_are_text():
    row = openai(with_reasoning("", "First <answer>1</answer>?"), with_reasoning("1702", "</think> it says"))
    found = read("openai", row).record
    first, last = "First [answer]1[/answer]?", "[/think] it says"
    assert found.text == TEXT.replace("Look.", first).replace("Found.", last)
    assert found.kept, found.reason


def test_words_and_reasoning_of_turns_in_a_row_are_one_thought():
    """No thought follows another in what the agents' rules accept."""
    row = openai(with_reasoning("I look.", HIDDEN), with_reasoning("1702", ALSO))
    row["messages"].insert(1, {"role": "assistant", "content": "A mill."})
    found = read("openai", row).record
    assert found.text == THOUGHT.replace(HIDDEN, f"A mill.\n\n{HIDDEN}\n\nI look.")
    assert found.kept, found.reason


def test_brackets_that_open_for_ever_are_a_bad_call_or_the_text_of_an_action():
    endless = "[" * 100_000
    calls = turns(("human", "q?"), ("function_call", endless), role="from", words="value")
    with pytest.raises(DataError, match="a function_call that is not JSON"):
        read("sharegpt", {"conversations": calls})
    text = f"{REACT.format('I look.', 'wiki_search', endless)}\nObservation: x\nFinal Answer: 7"
    found = read("react", {"question": "q?", "text": text}).record
    assert endless in json.dumps(found.model_dump(mode="json"))


BROKEN = {
    "atif": {
        "schema_version": "ATIF-v1.7",
        "steps": [{"step_id": 1, "source": "user", "message": [{"type": "text"}]}],
    },
    "openai_agents": {"data": [5, span(1, {"type": "generation", "output": ["Look."]}, trace_id="other")]},
    "smolagents": {**ROWS["smolagents"], "token_usage": {"input_tokens": "many"}},
}
SOUND = {
    "atif": {
        "schema_version": "ATIF-v1.7",
        "steps": [
            {"step_id": 1, "source": "user", "message": "When?"},
            {"step_id": 2, "source": "agent", "message": "<think>So.</think><answer>1702</answer>"},
        ],
    },
    "openai_agents": {"data": SPANS},
    "smolagents": ROWS["smolagents"],
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_row_that_no_reader_expects_is_a_bad_row_and_ends_nothing(name, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(BROKEN[name])}\n{json.dumps(SOUND[name])}\n")
    *bad, (line, found) = read_converted(path, FORMATS[name], Context(agent=SPEC))
    assert {(line, error.path, error.line) for line, error in bad} == {(1, str(path), 1)}
    assert line == 2
    assert found.record.question == "When?"


def test_an_empty_program_of_a_step_is_no_call():
    task, _, answer = ROWS["smolagents"]["steps"]
    empty = {"step_number": 1, "model_output": "Look.", "code_action": "", "observations": ""}
    text = read("smolagents", {"steps": [task, empty, answer]}).record.text
    assert text == "<think>Look.\n\nFound.</think><answer>1702</answer>"


def test_items_of_the_responses_api_become_one_turn_with_words_and_call() -> None:
    words = [{"type": "output_text", "text": "Look."}]
    items = [
        {"role": "user", "content": "When?"},
        {"type": "message", "role": "assistant", "content": words},
        {"type": "function_call", "call_id": "c1", "name": "wiki_search", "arguments": '{"query": "mill"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "1702"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]},
        {"role": "assistant", "content": "1702"},
    ]
    assert FORMATS["messages"].known(items)
    chat = [
        {"role": "user", "content": "When?"},
        {
            "role": "assistant",
            "content": "Look.",
            "tool_calls": [
                {"id": "c1", "function": {"name": "wiki_search", "arguments": '{"query": "mill"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1702"},
        {"role": "assistant", "content": "1702", "reasoning_content": "So."},
    ]
    assert read("messages", items).record.text == read("messages", chat).record.text
    with pytest.raises(DataError, match=r"messages\[1\]: got an item of type 'web_search_call'"):
        read("messages", [items[0], {"type": "web_search_call"}, *items[2:]])


_BLOCKS = [
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]},
    {"type": "text", "text": "Look."},
    {"type": "function_call", "name": "wiki_search", "arguments": '{"query": "mill"}'},
]


def langchain(words: object = "Look.", **more: object) -> list[dict[str, object]]:
    """A run of LangGraph as `message.model_dump()` writes it."""
    call = {"name": "wiki_search", "args": QUERY, "id": "c1", "type": "tool_call"}
    return [
        {"type": "human", "content": "When?", "additional_kwargs": {}, "name": None, "id": "h"},
        {"type": "ai", "content": words, "tool_calls": [call], "invalid_tool_calls": [], "id": "a"} | more,
        {
            "type": "tool",
            "content": "Built in 1702.",
            "name": "wiki_search",
            "tool_call_id": "c1",
            "status": "success",
        },
        {"type": "AIMessageChunk", "content": "1702", "tool_calls": [], "additional_kwargs": {}},
    ]


def test_messages_of_langchain_become_the_same_trajectory_in_every_form(tmp_path) -> None:
    dumped = langchain()
    as_dicts = [{"type": message["type"], "data": message} for message in dumped]
    serialised = [
        {"lc": 1, "type": "constructor", "id": ["AIMessage"], "kwargs": message} for message in dumped
    ]
    expected = f"{CALL}{SEEN.format('Built in 1702.')}<answer>1702</answer>".replace("Look.", "{}")
    for row in (dumped, as_dicts, serialised):
        assert FORMATS["messages"].known(row)
        found = read("messages", row).record
        assert (found.question, found.text) == ("When?", expected.format("Look."))
        assert read("openai", {"messages": row}).record.text == found.text
        (tmp_path / "run.json").write_text(json.dumps(row, indent=1))  # one conversation, not four rows
        [(_, again)] = read_converted(
            tmp_path / "run.json", detected(tmp_path / "run.json"), Context(agent=SPEC)
        )
        assert again.record.text == found.text
    assert read("messages", langchain(_BLOCKS)).record.text == expected.format("So.\n\nLook.")
    hidden = langchain(additional_kwargs={"reasoning_content": "So."})
    assert read("messages", hidden).record.text == expected.format("So.\n\nLook.")


def refused(path: Path) -> str:
    with pytest.raises(DataError) as error:
        detected(path)
    return error.value.message


def test_updates_of_langgraph_lack_the_question_and_are_refused_with_what_to_write(tmp_path) -> None:
    _, call, result, answer = langchain()
    updates = [{"agent": {"messages": [call]}}, {"tools": {"messages": [result], "seen": 1}}, {"end": None}]
    (tmp_path / "run.jsonl").write_text("".join(f"{json.dumps(update)}\n" for update in updates))
    (tmp_path / "run.json").write_text(json.dumps([*updates, {"agent": {"messages": [answer]}}]))
    for name in ("run.jsonl", "run.json"):
        assert "updates lack the question; write the whole run" in refused(tmp_path / name)
    (tmp_path / "run.json").write_text('{"agent": {"messages": ["no message"]}}')
    assert "LangGraph" not in refused(tmp_path / "run.json")
    (tmp_path / "run.jsonl").write_text(json.dumps(updates[0]))
    [(_, found)] = read_converted(tmp_path / "run.jsonl", FORMATS["messages"], Context(agent=SPEC))
    assert "an update of a LangGraph stream" in found.message


def test_of_a_real_stream_of_langgraph_the_last_state_is_read_and_the_updates_are_refused(tmp_path) -> None:
    prebuilt = pytest.importorskip("langgraph.prebuilt")
    models = pytest.importorskip("langchain_core.language_models.fake_chat_models")
    from langchain_core.messages import AIMessage

    class Model(models.GenericFakeChatModel):
        def bind_tools(self, tools: object, **more: object) -> object:
            return self

    def wiki_search(query: str) -> str:
        """Search."""
        return "Built in 1702."

    call = {"name": "wiki_search", "args": QUERY, "id": "c1"}
    said = [AIMessage("Look.", tool_calls=[call]), AIMessage("1702")]
    agent = prebuilt.create_react_agent(Model(messages=iter(said)), [wiki_search])
    updates, state = [], {}
    for mode, item in agent.stream({"messages": [("user", "When?")]}, stream_mode=["updates", "values"]):
        if mode == "updates":
            updates += [
                {node: {"messages": [part.model_dump() for part in given["messages"]]}}
                for node, given in item.items()
            ]
        else:
            state = item
    (tmp_path / "run.jsonl").write_text("".join(f"{json.dumps(update)}\n" for update in updates))
    assert "updates lack the question" in refused(tmp_path / "run.jsonl")
    whole = {"messages": [part.model_dump() for part in state["messages"]]}
    expected = f"{CALL}{SEEN.format('Built in 1702.')}<answer>1702</answer>"
    assert read("openai", whole).record.text == expected


def test_a_call_of_langchain_with_broken_arguments_is_a_bad_row_and_not_left_out() -> None:
    broken = [{"name": "wiki_search", "args": '{"query": ', "id": "c1", "error": None}]
    with pytest.raises(
        DataError, match=r"messages\[1\]: tool_calls: arguments of 'wiki_search' are not JSON"
    ):
        read("messages", langchain(tool_calls=[], invalid_tool_calls=broken))
    with pytest.raises(DataError, match="got a part of type 'image_url', expected text parts only; pictures"):
        read("messages", langchain([{"type": "image_url", "image_url": {"url": "x"}}]))
