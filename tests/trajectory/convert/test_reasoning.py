"""Hidden reasoning is a thought, in whatever place a format keeps it; expected texts by hand."""

from __future__ import annotations

import pytest

from afm.agents import load_agent
from afm.trajectory.convert import FORMATS, Context

FUNCTION = {"name": "wiki_search", "arguments": '{"query": "mill"}'}
OBSERVED = "\n<observation>\nBuilt in 1702.\n</observation>\n"
EXPECTED = (
    f"<think>I should search.</think><wiki_search>mill</wiki_search>{OBSERVED}"
    "<think>The page says so.</think><answer>1702</answer>"
)


def openai(first, last):
    """Two messages of the assistant, with a call between them."""
    called = {"role": "assistant", "tool_calls": [{"id": "c", "function": FUNCTION}], **first}
    result = {"role": "tool", "tool_call_id": "c", "content": "Built in 1702."}
    return {"messages": [{"role": "user", "content": "When?"}, called, result, {"role": "assistant", **last}]}


def atif(first, last):
    call = {"tool_call_id": "a", "function_name": "wiki_search", "arguments": {"query": "mill"}}
    observation = {"results": [{"source_call_id": "a", "content": "Built in 1702."}]}
    steps = [
        {"step_id": 1, "source": "user", "message": "When?"},
        {"step_id": 2, "source": "agent", "tool_calls": [call], "observation": observation, **first},
        {"step_id": 3, "source": "agent", **last},
    ]
    agent = {"name": "x", "version": "1"}
    return {"schema_version": "ATIF-v1.6", "session_id": "s", "agent": agent, "steps": steps}


def spans(first, last):
    def span(second, **data):
        return {"object": "trace.span", "trace_id": "t", "started_at": f"0{second}", "span_data": data}

    asked = [{"role": "user", "content": "When?"}]
    called = {"role": "assistant", "tool_calls": [{"id": "c", "function": FUNCTION}], **first}
    return [
        span(1, type="generation", input=asked, output=[called]),
        span(2, type="function", name="wiki_search", input='{"query": "mill"}', output="Built in 1702."),
        span(3, type="generation", input=asked, output=[{"role": "assistant", **last}]),
    ]


def read(name, row, **options):
    return FORMATS[name].read(row, Context(agent=load_agent("mhqa"), missing_thought="I go on.", **options))


def beside(words, hidden, place="content"):
    return {place: words, "reasoning_content": hidden}


HIDDEN, ALSO = "I should search.", "The page says so."


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("openai", openai(beside("", HIDDEN), beside("1702", ALSO))),
        ("openai", openai({"content": None, "reasoning": HIDDEN}, {"content": "1702", "reasoning": ALSO})),
        ("openai_agents", spans(beside("", HIDDEN), beside("1702", ALSO))),
        ("atif", atif(beside("", HIDDEN, "message"), beside("1702", ALSO, "message"))),
        (
            "openai",
            openai({"content": f"<think>{HIDDEN}</think>"}, {"content": f"<think>{ALSO}</think>\n1702"}),
        ),
        ("atif", atif({"message": f"<think>{HIDDEN}</think>"}, {"message": f"<think>{ALSO}</think>1702"})),
        # The chat template wrote the opening tag.
        ("openai", openai({"content": f"<Thinking>{HIDDEN}</Thinking>"}, {"content": f"{ALSO}</think>1702"})),
    ],
)
def test_hidden_reasoning_is_a_thought_of_its_own_and_nothing_stands_in_for_it(name, row):
    found = read(name, row).record
    assert found.text == EXPECTED
    assert found.kept, found.reason


def test_reasoning_before_tags_of_the_agent_joins_the_thought_that_begins_them():
    row = openai(
        beside("<think>Mill.</think>", "I should search."),
        beside("<answer>1702</answer>", "The page says so."),
    )
    assert read("openai", row).record.text == EXPECTED.replace("search.<", "search.\n\nMill.<")


def test_tags_in_reasoning_are_text():
    row = openai(beside("", "First <answer>1</answer>?"), beside("1702", "</think> it says"))
    found = read("openai", row).record
    assert found.text == (
        f"<think>First [answer]1[/answer]?</think><wiki_search>mill</wiki_search>{OBSERVED}"
        "<think>[/think] it says</think><answer>1702</answer>"
    )
    assert found.kept, found.reason


def test_words_and_reasoning_of_turns_in_a_row_are_one_thought():
    """No thought follows another in what the agents' rules accept."""
    row = openai(beside("I look.", "I should search."), beside("1702", "The page says so."))
    row["messages"].insert(1, {"role": "assistant", "content": "A mill."})
    found = read("openai", row).record
    assert found.text == EXPECTED.replace("I should search.", "A mill.\n\nI should search.\n\nI look.")
    assert found.kept, found.reason
