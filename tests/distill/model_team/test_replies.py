import pytest

from afm.distill.model_team.members import (
    Check,
    PlanReply,
    Reflection,
    Suggestion,
    ToolAgentReply,
    read_reply_as,
    unfenced,
)
from afm.distill.model_team.team import Memory, Result, shortened


def test_the_object_of_the_right_form_is_found_among_reasoning_and_fences():
    text = 'I {wonder}. {"score": 9}\n```json\n{"findings": "f", "score": "3"}\n```\nDone {}.'
    assert read_reply_as(Check, text) == Check(findings="f", score=3)


DRAFT = 'I would reply {"answer": "13"}, or {"findings": "ok", "score": 4}.'


@pytest.mark.parametrize(
    "before", [f"<think>{DRAFT}</think>", f"{DRAFT}</think>\n", f"<think>{DRAFT}</think>So: "]
)
def test_a_draft_in_the_reasoning_is_not_the_reply(before):
    assert read_reply_as(Suggestion, before + '{"answer": "42"}').answer == "42"
    assert read_reply_as(Check, before + '{"findings": "not 13", "score": 1}').score == 1


def test_replies_that_differ_are_none_and_parts_of_another_are_not_looked_at():
    quoted = '{"thought": "{\\"answer\\": \\"7\\"}", "answer": "42"}'
    assert read_reply_as(Suggestion, quoted).answer == "42"
    assert read_reply_as(Suggestion, f"{quoted} Once more: {quoted}").answer == "42"


def test_a_call_counts_whatever_the_model_made_up_behind_it():
    text = '{"tool": "wiki_search", "argument": "mill"}\n\nObservation: In 1650.\n\n{"finding": "Built in 1650."}'
    assert read_reply_as(ToolAgentReply, text) == ToolAgentReply(tool="wiki_search", argument="mill")


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        (Check, '<think>{"findings": "f", "score": 4}', "reasoning is not finished"),
        (Check, "no object", "it holds no JSON object"),
        (Check, '{"findings": "f", "sco', "its JSON object is not complete or not valid"),
        (Check, '{"findings": "f", "score": 5}', r"score: got 5 \(number\), expected at most 4"),
        (Check, '{"findings": "f", "score": 2} {"findings": "g", "score": 3}', "2 JSON objects that differ"),
        (Suggestion, '{"drafts": [{"answer": "13"}]}', "answer: missing, but required"),
        (Suggestion, '{"drafts": [{"answer": "13"}], "answer": "4', "not complete"),
        (Suggestion, '{"answer": null}', r"answer: got None \(null\), expected text"),
        (ToolAgentReply, '{"tool": "t"}', "expected either"),
    ],
)
def test_what_cannot_be_used_is_explained(kind, text, problem):
    with pytest.raises(ValueError, match=problem):
        read_reply_as(kind, text)


def test_steps_may_be_plain_texts_and_grades_of_any_case():
    plan = read_reply_as(PlanReply, '{"steps": ["one", {"goal": "two", "agent": null}]}')
    assert [(step.goal, step.agent) for step in plan.steps] == [("one", ""), ("two", "")]
    grades = '{"information_conflict": {"grade": "Good"}, "tool_effectiveness": {"grade": " POOR "}, '
    grades += '"trajectory_monitoring": {"grade": "average"}}'
    assert read_reply_as(Reflection, grades).poor


def test_numbers_stand_for_their_text_and_null_for_what_may_be_missing():
    suggestion = read_reply_as(Suggestion, '{"thought": null, "answer": 1702, "facts": null}')
    assert suggestion == Suggestion(answer="1702")
    action = read_reply_as(ToolAgentReply, '{"tool": "code", "argument": 42, "finding": null}')
    assert (action.calls, action.argument) == (True, "42")
    assert not read_reply_as(ToolAgentReply, '{"finding": "f"}').calls


def test_the_last_results_are_shown_whole_and_earlier_ones_by_their_calls():
    memory = Memory("q", shown_results=2)
    memory.results += [Result("s", f"a{number}", f"text {number}") for number in range(4)]
    memory.note("goal", "first")
    memory.note("other", "x")
    memory.note("goal", "second")

    view = memory.view()
    assert [result.text for result in view["results"]] == ["text 2", "text 3"]
    assert [call.argument for call in view["calls"]] == ["a0", "a1"]
    assert [(found.goal, found.text) for found in view["findings"]] == [("other", "x"), ("goal", "second")]
    assert memory.called("s", " A1 ")
    assert not memory.called("t", "a1")


def test_a_mended_program_is_another_call():
    program = "\n```py\nfor x in y:\n    a(x)\nb(x)\n```\n"
    memory = Memory("q", shown_results=2)
    memory.results.append(Result("code", program, "IndentationError"))

    assert memory.called("code", program.replace("b(x)", "b(x)  "))
    assert not memory.called("code", program.replace("b(x)", "    b(x)"))
    assert not memory.called("code", program.replace("a(x)", "A(x)"))


def test_a_long_result_loses_its_middle():
    text = "a" * 300 + "b" * 300
    short = shortened(text, 250)
    assert len(short) <= 250
    assert short.startswith("aaa")
    assert short.endswith("bbb")
    assert "characters left out" in short
    assert shortened("short", 250) == "short"


def test_one_fence_around_everything_is_taken_off():
    assert unfenced("```python\nprint(1)\n```") == "print(1)"
    assert unfenced(" print(1) ") == "print(1)"
