import pytest

from afm.agents import AgentSpec, load_agent, shipped_agents
from afm.agents.load import without_tools
from afm.trajectory import Author, Segment, validate


@pytest.mark.parametrize("name", shipped_agents())
def test_no_tool_is_left_and_the_prompt_names_none(name):
    spec = load_agent(name)
    bare = without_tools(spec)
    assert bare.name == f"{name}_without_tools"
    assert (bare.tool_roles, bare.observation_role) == ({}, None)
    assert bare.stop_strings == (f"</{spec.answer_role}>",)
    prompt = bare.user_message("Who?")
    assert "You have no tools here" in prompt
    assert prompt.endswith("Question: Who?")
    for tag in (*spec.tool_roles, spec.observation_role):
        assert f"<{tag}>" not in prompt


@pytest.mark.parametrize(
    ("name", "answer"), [("math", "\\boxed{4}"), ("code", "```py\n4\n```"), ("web", "4")]
)
def test_a_thought_and_an_answer_in_the_agents_format_are_valid(name, answer):
    bare = without_tools(load_agent(name))
    text = f"<think>I know it.</think>\n<answer>{answer}</answer>"
    assert validate([Segment(Author.AGENT, text)], bare) == ()
    assert validate([Segment(Author.AGENT, text.replace(answer, ""))], bare) != ()


def test_an_agent_whose_prompt_is_empty_is_told_so_too():
    tiny = load_agent("math").model_copy(update={"prompt": "", "question_format": "{question}"})
    assert (
        without_tools(tiny)
        .user_message("2+2?")
        .startswith("Answer the question below. You have no tools here")
    )


def test_an_agent_without_tools_stays_as_it_is():
    spec = AgentSpec(name="plain", roles={"answer": {"kind": "answer"}}, transitions={"start": ["answer"]})
    assert without_tools(spec) is spec
    bare = without_tools(load_agent("math"))
    assert without_tools(bare) is bare


def test_two_agents_have_two_digests_and_the_limits_stay():
    spec = load_agent("web")
    bare = without_tools(spec)
    assert bare.digest != spec.digest
    assert bare.limits.max_response_tokens == spec.limits.max_response_tokens
    assert bare.limits.max_turns == 0
