import pytest
from pydantic import ValidationError

from afm.agents import AgentSpec, Grade, load_agent

MATH = load_agent("math")
WEB = load_agent("web")

REFLECTION = "Information conflict: {}\nTool effectiveness: {}\nTrajectory monitoring: {}"


def spec(**changes: object) -> AgentSpec:
    data: dict[str, object] = {
        "name": "mini",
        "roles": {
            "think": {"kind": "thought"},
            "tool": {"kind": "tool", "tool": "t"},
            "observation": {"kind": "observation"},
            "answer": {"kind": "answer"},
        },
        "transitions": {"start": ["tool", "answer"], "tool": ["answer"]},
    }
    return AgentSpec.model_validate(data | changes)


def test_stop_strings_are_closed_calls_the_answer_and_a_forged_observation() -> None:
    assert MATH.stop_strings == ("</code>", "</answer>", "<observation>")
    assert WEB.stop_strings == ("</web_search>", "</crawl_page>", "</answer>", "<observation>")


@pytest.mark.parametrize(
    ("agent", "role", "following"),
    [
        ("math", "start", {"plan"}),
        ("math", "plan", {"code", "answer"}),
        ("math", "code", {"reflection"}),
        ("math", "reflection", {"code", "answer"}),
        ("web", "plan", {"web_search", "crawl_page", "suggested_answer"}),
        ("web", "web_search", {"web_search", "crawl_page", "reflection", "suggested_answer"}),
        ("web", "crawl_page", {"web_search", "crawl_page", "reflection", "suggested_answer"}),
        ("web", "reflection", {"plan", "web_search", "crawl_page", "suggested_answer"}),
        ("web", "suggested_answer", {"double_check"}),
        ("web", "double_check", {"plan", "web_search", "crawl_page", "answer"}),
        ("wiki", "plan", {"wiki_search", "suggested_answer"}),
        ("wiki", "double_check", {"plan", "wiki_search", "answer"}),
        ("mhqa", "reflection", {"plan", "wiki_search", "answer"}),
        ("full", "plan", {"web_search", "crawl_page", "code", "visual_inspector", "suggested_answer"}),
    ],
)
def test_shipped_transitions_are_the_papers(agent: str, role: str, following: set[str]) -> None:
    assert set(load_agent(agent).transitions[role]) == following
    assert load_agent("code").transitions == load_agent("math").transitions


@pytest.mark.parametrize("agent", ["web", "mhqa", "wiki", "full"])
def test_every_function_of_the_search_agents_needs_a_thought(agent: str) -> None:
    needing = {tag for tag, role in load_agent(agent).roles.items() if role.needs_thought}
    assert needing == set(load_agent(agent).roles) - {"think", "observation"}


@pytest.mark.parametrize("agent", ["math", "code"])
def test_math_and_code_think_before_code_and_answer_and_plan_once(agent: str) -> None:
    roles = load_agent(agent).roles
    assert {tag for tag, role in roles.items() if role.needs_thought} == {"code", "answer"}
    assert {tag for tag, role in roles.items() if role.no_thought} == {"plan", "reflection"}
    assert {tag: role.max_count for tag, role in roles.items() if role.max_count} == {"plan": 1}


CHECKED = {"plan", "web_search", "crawl_page"}
GOOD = REFLECTION.format("good", "good", "good")


@pytest.mark.parametrize(
    ("role", "text", "following"),
    [
        ("reflection", REFLECTION.format("good", "average", "good"), {*CHECKED, "suggested_answer"}),
        ("reflection", REFLECTION.format("Good", "good", "POOR"), {"plan"}),
        # "poor" outside of a grade is none
        ("reflection", GOOD + "\nThe archive has poor coverage.", {*CHECKED, "suggested_answer"}),
        ("double_check", "fits\nscore: 2", CHECKED),
        ("double_check", "**Score**: 3", {"answer"}),
        ("double_check", "no score given", {*CHECKED, "answer"}),
        ("double_check", "Score: 10", {*CHECKED, "answer"}),
    ],
)
def test_a_grade_decides_what_may_follow(role: str, text: str, following: set[str]) -> None:
    assert set(WEB.allowed_next(role, text)) == following


def test_letter_case_matters_in_no_grade() -> None:
    assert Grade(pattern=r"(\w+)", reject=("Poor",)).rejects("pOOR") is True


def test_digest_changes_with_any_declared_value() -> None:
    assert spec().digest == spec().digest
    assert spec().digest != spec(description="x").digest
    assert len(spec().digest) == 16


ANSWER = {"answer": {"kind": "answer"}}


def graded(pattern: str) -> dict[str, object]:
    return {"roles": ANSWER | {"check": {"grade": {"pattern": pattern, "reject": ["1"]}}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"roles": ANSWER | {"a-b": {}}}, "lower-case letters"),
        ({"roles": ANSWER | {"start": {}}}, "reserved"),
        ({"roles": {"plan": {}}}, "exactly one role of kind 'answer'"),
        ({"roles": ANSWER | {"code": {"kind": "tool", "tool": "c"}}}, "'observation'"),
        (
            {"roles": ANSWER | {"observation": {"kind": "observation", "tool": "c"}}},
            "got kind 'observation' and tool 'c'; write `kind: tool` and `tool: NAME`, or neither",
        ),
        ({"roles": {"answer": {"kind": "answer", "needs_thought": True}}}, "needs_thought"),
        ({"transitions": {"start": ["answer"]}}, "missing ['tool']"),
        ({"transitions": {"start": ["think"], "tool": []}}, "'think' cannot follow; it is of kind 'thought'"),
        (
            {"transitions": {"start": ["tol", "answer"], "tool": []}},
            "transitions.start: 'tol' cannot follow; did you mean 'tool'?",
        ),
        (
            {"transitions": {"start": ["answer"], "tool": [], "toool": []}},
            "transitions.toool: nothing follows it; did you mean 'tool'?",
        ),
        (
            {"transitions": {"start": ["answer"], "tool": [], "answer": ["tool"]}},
            "transitions.answer: nothing follows it; it is of kind 'answer'",
        ),
        (
            {"transitions": {"start": ["tool"], "tool": ["tool"]}},
            "no path leads from 'start' to the answer role 'answer'; "
            "let one of ['answer'] follow one of ['start', 'tool']",
        ),
        ({"question_format": "no placeholder"}, "placeholder"),
        ({"name": "Bad Name"}, "pattern"),
        (graded("(["), "not a regular expression"),
        (graded("score"), "0 groups"),
    ],
)
def test_contradictory_declarations_are_refused(changes: dict[str, object], message: str) -> None:
    rest = {"transitions": {}} if "roles" in changes else {}
    with pytest.raises(ValidationError) as error:
        spec(**rest, **changes)
    assert message in str(error.value)


PLANNED = {"plan": {}, "check": {"grade": {"pattern": r"(\d)", "reject": ["1"], "when_accepted": ["answer"]}}}


def test_an_agent_that_can_never_answer_is_refused_with_the_missing_step() -> None:
    """Only the grade of `check` leads to the answer, and nothing leads to `check`."""
    parts = {"roles": ANSWER | PLANNED, "transitions": {"start": ["plan"], "plan": ["plan"], "check": []}}
    with pytest.raises(
        ValidationError, match=r"let one of \['check', 'answer'\] follow one of \['start', 'plan'\]"
    ):
        spec(**parts)
    parts["transitions"] = {"start": ["plan"], "plan": ["check"], "check": []}
    assert spec(**parts).allowed_next("check", "2") == ("answer",)


def test_user_message_is_instruction_blank_line_question() -> None:
    message = MATH.user_message("1 + 1?")
    instruction, _, question = message.rpartition("\n\n")
    assert instruction == MATH.system_prompt()
    assert question == "Question: 1 + 1?"


def test_question_is_taken_as_it_is() -> None:
    assert MATH.user_message("{roles} {question}").endswith("Question: {roles} {question}")
