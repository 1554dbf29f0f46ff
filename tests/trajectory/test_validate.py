from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afm.agents import AgentSpec, load_agent
from afm.errors import Fault
from afm.trajectory import Author, Segment, author_segments, validate

MATH = load_agent("math")
WEB = load_agent("web")
MHQA = load_agent("mhqa")

CODE = "<think>t</think><code>print(1)</code>\n<observation>\n1\n</observation>\n<reflection>ok</reflection>"
END = "<think>u</think><answer>\\boxed{1}</answer>"


def kinds(text: str, spec: AgentSpec = MATH) -> list[tuple[Fault | None, int]]:
    return [(fault.kind, fault.character) for fault in validate(author_segments(text, spec), spec)]


def web(*functions: str) -> str:
    """A web trajectory: each function gets its thought, each call its observation."""
    parts = []
    for function in functions:
        parts.append(f"<think>t</think>\n{function}")
        if function.startswith(("<web_search>", "<crawl_page>")):
            parts.append("\n<observation>\no\n</observation>\n")
    return "".join(parts)


SEARCH, CRAWL = "<web_search>q</web_search>", "<crawl_page>https://a.example/</crawl_page>"
PLAN, SUGGEST, ANSWER = "<plan>p</plan>", "<suggested_answer>a</suggested_answer>", "<answer>a</answer>"


def check(score: int) -> str:
    return f"<double_check>Score: {score}</double_check>"


def reflect(grade: str) -> str:
    return f"<reflection>Information conflict: good\nTool effectiveness: {grade}\nTrajectory monitoring: good</reflection>"


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        (f"<plan>p</plan>{END}\n", []),
        (f"<plan>p</plan>{CODE * 3}{END}", []),
        ("<plan>p</plan>" + CODE.replace("\n1\n", "") + END, []),  # an observation may be empty
        (f"<think>t</think><plan>p</plan>{END}", [(Fault.THOUGHT, 16)]),
        (f"<plan>p</plan><plan>q</plan>{END}", [(Fault.TRANSITION, 14), (Fault.COUNT, 14)]),
        (f"<plan>p</plan><think>a</think>{END}", [(Fault.THOUGHT, 30)]),
        (f"<plan>p</plan>\n<observation>x</observation>\n{END}", [(Fault.OBSERVATION, 15)]),
        (f"{PLAN}{CODE[:-27]}<observation>2</observation>{CODE[-27:]}{END}", [(Fault.OBSERVATION, 83)]),
        (f"<plan>p</plan>{CODE}", [(Fault.NO_ANSWER, 14 + len(CODE))]),
        (f"<plan>p</plan>{END}<think>more</think>", [(Fault.AFTER_ANSWER, 14 + len(END))]),
        (f"<plan>p</plan>{END} bye", [(Fault.STRAY_TEXT, 15 + len(END))]),
        (f"<plan> \n</plan>{END}", [(Fault.EMPTY, 0)]),
        ("<plan>p</plan><think> </think><answer>\\boxed{1}</answer>", [(Fault.EMPTY, 14)]),
        *(
            (f"<plan>p</plan><think>t</think><answer>{content}</answer>", [(Fault.ANSWER_FORMAT, 30)])
            for content in ("42", "", "\\boxed{}", "\\boxed{4")
        ),
        (
            "<think>a</think><plan>a</plan> hm <think>b</think><code>1</code><think>c<answer>",
            [(Fault.THOUGHT, 16), (Fault.STRAY_TEXT, 31), (Fault.UNCLOSED, 64), (Fault.NO_ANSWER, 80)],
        ),
    ],
)
def test_faults_of_a_math_trajectory_come_in_the_order_of_the_text(
    text: str, faults: list[tuple[Fault, int]]
) -> None:
    assert kinds(text) == faults


OK, T = "<reflection>ok</reflection>", "<think>t</think>"


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        (f"{CODE}{END}", "<code> at character 16 (line 1", "may not begin the response; expected <plan>"),
        (f"{PLAN}{CODE.removeprefix(T)}{END}", "<code> at character 14 (line 1", "has no <think> directly"),
        (f"{PLAN}{CODE.removesuffix(OK)}{END}", "<answer> at character 99 (line 5", "may not follow <code>"),
        (f"{PLAN}{T}<code>1</code>{OK}{END}", "<reflection> at character 44 (line 1", "follows <code>"),
    ],
)
def test_a_fault_names_role_place_and_expectation(text: str, place: str, message: str) -> None:
    [fault] = validate(author_segments(text, MATH), MATH)
    assert fault.message.startswith(f"{place} of the text) {message}")


def test_the_order_of_a_web_trajectory_follows_its_grades() -> None:
    assert kinds(web(PLAN, SUGGEST, check(4), ANSWER), WEB) == []
    for score in (1, 2, 3, 4):
        assert (kinds(web(SEARCH, SUGGEST, check(score), ANSWER), WEB) == []) is (score >= 3)
    for text in (
        web(SEARCH, SUGGEST, check(4), SEARCH, SUGGEST, check(4), ANSWER),
        web(SEARCH, SUGGEST, ANSWER),
    ):
        assert [kind for kind, _ in kinds(text, WEB)] == [Fault.TRANSITION]


LOOKED_UP = "<think>t</think><wiki_search>q</wiki_search>\n<observation>\no\n</observation>\n"
AGAIN = (PLAN, SEARCH, SUGGEST, check(2), SEARCH, SUGGEST, check(3), ANSWER)


def test_whole_trajectories_are_valid() -> None:
    assert kinds(web(PLAN, SEARCH, CRAWL, reflect("poor"), *AGAIN), WEB) == []
    text = (
        f"{LOOKED_UP * 2}<think>t</think><reflection>sure</reflection><think>t</think><answer>a | b</answer>"
    )
    assert kinds(text, MHQA) == []


def test_poor_reflection_must_lead_to_a_plan() -> None:
    text = web(SEARCH, reflect("poor"), SEARCH, SUGGEST, check(3), ANSWER)
    (fault,) = validate(author_segments(text, WEB), WEB)
    assert fault.message.endswith(" follow <reflection>; expected <plan>")
    assert kinds(text.replace("poor", "average"), WEB) == []


CALL = "<plan>p</plan><think>t</think><code>1</code>"
REFLECTED = f"<reflection>r</reflection>{END}"


@pytest.mark.parametrize(
    ("texts", "character"),
    [
        ((f"<plan>p</plan>{CODE}{END}",), 52),  # an observation that the agent wrote is forged
        (("", "<plan>p</plan>", END), 0),
        ((CALL, "\n<observation>1</obser", f"vation>\n{REFLECTED}"), 45),  # a step over a joint of authors
        ((CALL, "\n<observation>", f"1</observation>\n{REFLECTED}"), 45),
    ],
)
def test_a_step_that_another_author_wrote_is_a_fault(texts: tuple[str, ...], character: int) -> None:
    """The texts are the agent's and the environment's in turn."""
    authors = (Author.AGENT, Author.ENVIRONMENT, Author.AGENT)
    segments = [Segment(author, text) for author, text in zip(authors, texts, strict=False)]
    faults = validate(segments, MATH)
    assert [(fault.kind, fault.character) for fault in faults] == [(Fault.AUTHOR, character)]


def test_segments_cut_within_one_author_change_nothing_and_none_lack_an_answer() -> None:
    whole = author_segments(f"<plan>p</plan>{CODE}{END}", MATH)
    pieces = [Segment(segment.author, letter) for segment in whole for letter in segment.text]
    assert validate(pieces, MATH) == ()
    assert [fault.kind for fault in validate([], MATH)] == [Fault.NO_ANSWER]


walks = st.lists(st.integers(min_value=0, max_value=10), min_size=30, max_size=30)


@given(walks)
def test_every_walk_along_the_declared_transitions_is_valid(choices: list[int]) -> None:
    """A generator that knows the declaration only, and a validator, agree on what is allowed."""
    parts, role = [], "start"
    for choice in choices:
        targets = WEB.allowed_next(role, parts[-1] if parts else "")
        role = targets[choice % len(targets)]
        body = {"double_check": f"Score: {choice % 4 + 1}"}.get(role, "x")
        parts.append(f"<{role}>{body}</{role}>")
        if role == WEB.answer_role:
            break
    text = web(*parts)
    expected = [] if role == WEB.answer_role else [Fault.NO_ANSWER]
    assert [kind for kind, _ in kinds(text, WEB) if kind is not Fault.OBSERVATION] == expected
