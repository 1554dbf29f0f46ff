import gc
import time

import pytest

from afm.agents import load_agent
from afm.agents.load import without_tools
from afm.trajectory import Author, Segment
from afm.trajectory.call_forms import WrittenCall, written_calls

MATH = load_agent("math")
BARE = without_tools(MATH)


def calls(text, spec=MATH, **options):
    return [
        (call.name, call.offered) for call in written_calls([Segment(Author.AGENT, text)], spec, **options)
    ]


def test_the_agents_own_calls_are_offered_and_anothers_are_not():
    text = "<plan>P</plan><think>T</think><code>print(1)</code>\n<observation>\n1\n</observation>\n"
    assert calls(text) == [("code", True)]
    assert calls(f"{text}<web_search>Bonn</web_search>") == [("code", True), ("web_search", False)]
    assert calls("<web_search>Bonn</web_search>", load_agent("web")) == [("web_search", True)]


def test_authors_change_nothing_about_what_the_agent_wrote():
    parts = [
        "<plan>P</plan><think>T</think><code>1</code>",
        "\n<observation>\n<calculator>1</calculator>\n</observation>\n",
    ]
    segments = [Segment(Author.AGENT, parts[0]), Segment(Author.ENVIRONMENT, parts[1])]
    assert written_calls(segments, MATH) == (WrittenCall("code", offered=True),)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("<calculator>2+2</calculator>", "calculator"),
        ("<wiki_search>Bonn", "wiki_search"),
        ("<WIKI_SEARCH>Bonn</WIKI_SEARCH>", "wiki_search"),
        ('<lookup key="x"/>', "lookup"),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "add"),
        ('<function_calls><invoke name="add"><parameter>1</parameter></invoke></function_calls>', "add"),
        ('<function=add>{"a": 1}</function>', "add"),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', "add"),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "add"),
        ("Thought: hm\nAction: add\nAction Input: 1", "add"),
        ('I call {"name": "add", "arguments": "{}"} now', "add"),
        ("Thought 1: hm\nAction 1: add[1, 2]", "add"),
        ("**Action:** add\n**Action Input:** 1", "add"),
        ('{"arguments": {"a": 1}, "name": "add"}', "add"),
        ('{"name": "add", "id": "c1", "index": 0, "arguments": {"a": 1}}', "add"),
        ('{"arguments": "{\\"a\\": 1}", "type": "function", "name": "add"}', "add"),
        ('```json\n{\n  "action": "add",\n  "action_input": {"a": 1}\n}\n```', "add"),
        ("<think>never closed <calculator>2</calculator>", "calculator"),
    ],
)
def test_forms_of_calls_are_recognised_once_each_with_or_without_tools(text, name):
    assert calls(text) == [(name, False)]
    assert calls(text, BARE, original=MATH) == [(name, False)]


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 4.",
        "<think>I could write <calculator>2</calculator> or Action: add\nAction Input: 1</think><answer>\\boxed{4}</answer>",
        "<b>bold</b> H<sub>2</sub>O<br/> <p>text</p>",
        "#include <iostream>\nstd::vector<int> v; if (a <b && c> d) {}",
        "</calculator>",
        "<plan>2</plan><reflection>r</reflection>",
        '{"name": "Bonn", "inhabitants": 330000}',
        '{"arguments": "for and against"}, {"name": "Bonn"}',
        "Action: none is needed.",
        "Action 3: Finish[4]",
        "<code>never closed <calculator>2</calculator>",
        "",
    ],
)
def test_content_html_and_text_functions_are_no_calls(text):
    assert calls(text) == []


def test_a_foreign_form_of_an_own_tool_is_offered_and_without_tools_nothing_is():
    text = '<tool_call>{"name": "code", "arguments": {}}</tool_call>'
    assert calls(text) == [("code", True)]
    assert calls(text, BARE) == [("code", False)]
    assert calls("<code>print(1)</code>", BARE) == [("code", False)]


def test_the_tags_of_an_agent_of_ones_own_are_known_without_its_tools():
    roles = {
        "ponder": {"kind": "thought"},
        "verify": {},
        "abacus": {"kind": "tool", "tool": "bead_counter"},
        "seen": {"kind": "observation"},
        "answer": {"kind": "answer"},
    }
    transitions = {"start": ["abacus", "verify"], "abacus": ["answer"], "verify": ["answer"]}
    own = type(MATH)(name="own", roles=roles, transitions=transitions)
    bare = without_tools(own)
    assert calls("<verify>x</verify><abacus>", bare, original=own) == [("abacus", False)]
    assert calls("<verify>x</verify>", bare) == [("verify", False)]
    assert calls('{"name": "bead_counter", "arguments": {}}', own) == [("bead_counter", True)]


@pytest.mark.parametrize(
    "parts",
    [["<a1>"], ["<zz>", "</zz>"], ["<tool_call>"], ["Action: x\n", "\n\n"]],
    ids=lambda parts: parts[0].strip(),
)
def test_hostile_text_takes_time_in_proportion(parts):

    def cost(count):
        text = "".join(part * count for part in parts)
        times = []
        gc.disable()  # what other tests left behind costs most of the time otherwise
        for _ in range(3):
            begun = time.process_time()
            calls(text, BARE)
            times.append(time.process_time() - begun)
        gc.enable()
        return min(times)

    assert cost(24_000) < 12 * max(cost(6_000), 0.01)
