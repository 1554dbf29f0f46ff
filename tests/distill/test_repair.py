import pytest

from afm.agents import load_agent
from afm.distill.event_log import Event, EventKind
from afm.distill.merge import RoleMap, merge_attempt
from afm.errors import ConfigError

SPEC = load_agent("wiki")
TASK = {"position": 0, "task": {"id": "a", "question": "q?", "ground_truth": "7"}}
ROLES = RoleMap(
    messages={
        "planner": "plan",
        "critic": "reflection",
        "writer": "suggested_answer",
        "tester": "double_check",
    },
    missing_thought="Next: {intent}",
    optional=("critic",),
    silent=("clerk",),
)


def record(*events, roles=ROLES, spec=SPEC):
    rows = [("task", "", "", TASK), *events]
    whole = []
    for number, (kind, agent, content, meta) in enumerate(rows):
        text = {"agent": agent, "content": content, "tool": "wiki_search" if kind.startswith("tool") else ""}
        whole.append(
            Event(id=f"a#1.{number}", task_id="a", attempt=1, kind=EventKind(kind), meta=meta, **text)
        )
    return merge_attempt(whole, spec, roles)


def say(agent, content, **meta):
    return ("message", agent, content, meta)


def think(agent, content):
    return say(agent, content, part="thought")


def search(query, found, **meta):
    return (("tool_call", "searcher", query, meta), ("tool_result", "", found, {}))


END = (
    think("writer", "So."),
    say("writer", "7"),
    think("tester", "I test."),
    say("tester", "Score: 4"),
    think("tester", "Good."),
    ("final", "writer", "7", {}),
)
END_TEXT = (
    "<think>So.</think><suggested_answer>7</suggested_answer><think>I test.</think>"
    "<double_check>Score: 4</double_check><think>Good.</think><answer>7</answer>"
)


def test_thoughts_in_a_row_become_one_and_the_rest_stays():
    plan = (think("planner", "One."), think("planner", "Two."), say("planner", "Plan."))
    made = record(*plan, think("searcher", "Look."), *search("x", "found"), *END)

    assert made.reason == ""
    assert made.text == (
        "<think>One.\n\nTwo.</think><plan>Plan.</plan><think>Look.</think><wiki_search>x</wiki_search>"
        f"\n<observation>\nfound\n</observation>\n{END_TEXT}"
    )
    assert made.provenance["repairs"] == {"joined thoughts": 1}
    first = {"role": "think", "agent": "planner", "event": "a#1.1", "also": ["a#1.2"]}
    assert made.provenance["steps"][0] == first


def test_a_missing_thought_is_made_from_what_the_step_was_for():
    made = record(*search("x", "found", intent="find x"), *END)

    assert made.reason == ""
    assert made.text.startswith("<think>Next: find x</think><wiki_search>x</wiki_search>")
    assert made.provenance["repairs"] == {"missing thought": 1}
    assert made.provenance["steps"][0]["repair"] == "missing thought"


@pytest.mark.parametrize("roles", [ROLES, ROLES.model_copy(update={"missing_thought": ""})])
def test_without_an_intent_or_words_for_it_the_task_is_rejected(roles):
    assert "has no <think> directly before it" in record(*search("x", "found"), *END, roles=roles).reason


TWICE = (say("planner", "Plan."), say("planner", "Plan."))
TWO = (say("planner", "Plan A."), think("planner", "Two."), say("planner", "Plan B."))
JOINED, KNOWS = {"joined thoughts": 1}, "I know it now."
KNOWN = think("planner", KNOWS)
WITHIN = (KNOWN, think("planner", "no"), KNOWN, say("planner", "Plan."))


@pytest.mark.parametrize(
    ("messages", "text", "repairs"),
    [
        (TWICE, "<think>One.</think><plan>Plan.</plan>", {"repeated message": 1}),
        (TWO, "<think>One.\n\nTwo.</think><plan>Plan A.\n\nPlan B.</plan>", JOINED | {"joined messages": 1}),
        # "no" stands within a word and is not lost; a whole paragraph that is repeated is.
        (WITHIN, f"<think>One.\n\n{KNOWS}\n\nno</think><plan>Plan.</plan>", {"joined thoughts": 3}),
    ],
)
def test_messages_and_thoughts_in_a_row_become_one(messages, text, repairs):
    look = (think("searcher", "Look."), *search("x", "found"))
    made = record(think("planner", "One."), *messages, *look, *END)
    assert made.reason == ""
    assert made.text.startswith(f"{text}<think>Look.</think>")
    assert made.provenance["repairs"] == repairs


def test_optional_messages_go_only_where_the_order_forbids_them_and_silent_ones_always():
    plan = (think("planner", "One."), say("planner", "Plan."))
    gone = (think("critic", "Hm."), say("critic", "Too early."), say("clerk", "Filed."))
    made = record(*plan, *gone, *search("x", "found"), *END)
    assert made.reason == ""
    assert "<plan>Plan.</plan><think>Hm.</think><wiki_search>x</wiki_search>" in made.text
    assert made.provenance["repairs"] == {"dropped message": 1}
    looked = (think("searcher", "Look."), *search("x", "found"))
    there = record(*looked, think("critic", "Hm."), say("critic", "It goes well."), *END)
    assert "<think>Hm.</think><reflection>It goes well.</reflection>" in there.text


def test_a_thought_where_none_may_stand_goes():
    work = (think("planner", "Hm."), say("planner", "Plan."), think("writer", "So."), END[-1])
    made = record(*work, roles=RoleMap(messages={"planner": "plan"}), spec=load_agent("math"))
    assert made.text == "<plan>Plan.</plan><think>So.</think><answer>\\boxed{7}</answer>"
    assert made.provenance["repairs"] == {"dropped thought": 1}


def test_a_thought_role_that_the_agent_lacks_is_refused():
    with pytest.raises(ConfigError, match="'thought' -> 'thoughts' is not a role of agent 'wiki'"):
        ROLES.model_copy(update={"thought": "thoughts"}).checked(SPEC)
