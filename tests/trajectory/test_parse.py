from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afm.agents import AgentSpec, load_agent
from afm.errors import Fault, TrajectoryError
from afm.trajectory import Author, Segment, Step, Trajectory, author_segments, parse, render, structure_faults
from afm.trajectory.tags import blocks, split

MATH = load_agent("math")
AGENT, ENVIRONMENT = Author.AGENT, Author.ENVIRONMENT

GOOD = (
    "<plan>add</plan>\n<think>t</think> <code>print(1)</code>"
    "\n<observation>\n1\n</observation>\n<reflection>ok</reflection><think>u</think><answer>\\boxed{1}</answer>\n"
)

TAGS = [form.format(tag) for form in ("<{}>", "</{}>") for tag in MATH.roles]
PIECES = ["<", ">", "</", "<thin", "k>", " ", "\n", "a", "é", "🙂", "<b>", "</b>", "think", "<Plan>"]
tag_soup = st.lists(st.sampled_from(TAGS + PIECES), max_size=40).map("".join)

plain = st.text(alphabet="ab <>/\n\\é🙂{}`|", max_size=12).filter(lambda text: "<" not in text)
white = st.text(alphabet=" \n\t", max_size=3)
steps = st.builds(Step, st.sampled_from(sorted(MATH.roles)), plain, white)
trajectories = st.builds(Trajectory, st.lists(steps, max_size=8).map(tuple), white)


def test_steps_carry_content_white_space_and_offsets() -> None:
    trajectory = parse(GOOD, MATH)
    assert trajectory.steps == (
        Step("plan", "add"),
        Step("think", "t", "\n"),
        Step("code", "print(1)", " "),
        Step("observation", "\n1\n", "\n"),
        Step("reflection", "ok", "\n"),
        Step("think", "u"),
        Step("answer", "\\boxed{1}"),
    )
    assert trajectory.tail == "\n"
    code = trajectory.steps[2]
    assert (code.start, code.end) == (34, 55)
    assert GOOD[code.start : code.end] == "<code>print(1)</code>"
    assert GOOD[code.content_start : code.content_end] == "print(1)"


@pytest.mark.parametrize(
    ("text", "kind", "character", "message"),
    [
        ("<plan>a</plan>\n<cod>x</cod>", Fault.UNKNOWN_ROLE, 15, "<cod> at character 15 (line 2 of the text) is not a role of agent 'math'; did you mean 'code'?"),
        ("<think>to use <code> now</think>", Fault.NESTED, 14, "<code> at character 14 (line 1 of the text) is inside <think>; expected no tag of a role there"),
        ("<plan>a</plan>\n\n<think>and then", Fault.UNCLOSED, 16, "<think> opened at character 16 (line 3 of the text) is never closed"),
        ("<plan>a</plan>\n  so far <think>b</think>", Fault.STRAY_TEXT, 17, "'so far ' at character 17 (line 2 of the text) is outside of every role"),
    ],
)  # fmt: skip
def test_a_fault_says_what_where_and_why(text: str, kind: Fault, character: int, message: str) -> None:
    with pytest.raises(TrajectoryError) as error:
        parse(text, MATH)
    assert (error.value.kind, error.value.character, error.value.message) == (kind, character, message)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        *(
            (text, [])
            for text in ("", " \n", "<plan></plan>", "<think>if a <b and List<int> or <br></think>")
        ),
        ("<code>1</code><observation><think><b> </code> <answer></observation>", []),
        *((f"{tag}a", [(Fault.UNKNOWN_ROLE, 0)]) for tag in ("<Plan>", "<plan x=1>", "<plan/>", "<b>")),
        ("<cod>x</cod> y", [(Fault.UNKNOWN_ROLE, 0)]),  # not again for its closing tag and text
        *((f"<plan>a</plan>{end}", [(Fault.UNCLOSED, 14)]) for end in ("<", "</", "<thi", "</plan")),
        ("<plan>a</plan> bye", [(Fault.STRAY_TEXT, 15)]),
        ("hm<plan>a</plan></th", [(Fault.STRAY_TEXT, 0), (Fault.UNCLOSED, 16)]),
        ("</think><plan>a</plan>", [(Fault.STRAY_CLOSE, 0)]),
    ],
)
def test_faults_of_structure_by_kind_and_place(text: str, faults: list[tuple[Fault, int]]) -> None:
    assert [(fault.kind, fault.character) for fault in structure_faults(text, MATH)] == faults
    if not faults:
        assert render(parse(text, MATH)) == text


def test_blocks_of_any_name_continue_behind_a_tag_that_is_never_closed() -> None:
    text = "<a><b>1</b> <a><b>2</b>"
    assert [(block.role, block.content, block.start, block.end) for block in blocks(text)] == [
        ("a", "", 0, -1),
        ("b", "1", 3, 11),
        ("a", "", 12, -1),
        ("b", "2", 15, 23),
    ]


def test_error_carries_file_and_line_of_its_row() -> None:
    with pytest.raises(TrajectoryError) as error:
        parse("oops", MATH, path="train.jsonl", line=17)
    assert str(error.value).startswith(
        "train.jsonl:17: 'oops' at character 0 (line 1 of the text) is outside"
    )
    assert isinstance(error.value, ValueError)


def test_every_fault_is_reported_in_order_and_the_split_keeps_the_sound_steps() -> None:
    text = "hm<plan>a</plan></code><serch>q<think>x <answer>y</think><answer>"
    assert [(fault.kind, fault.character) for fault in structure_faults(text, MATH)] == [
        (Fault.STRAY_TEXT, 0),
        (Fault.STRAY_CLOSE, 16),
        (Fault.UNKNOWN_ROLE, 23),
        (Fault.NESTED, 40),
        (Fault.UNCLOSED, 57),
    ]
    parts = split(text, MATH)
    assert [step.role for step in parts.steps] == ["plan", "think"]
    assert render(Trajectory(parts.steps, parts.tail)) == text


def test_list_of_faults_ends_where_nobody_reads_on() -> None:
    assert len(structure_faults("</plan>" * 5000, MATH)) == 1000


@given(tag_soup)
def test_split_renders_back_and_parse_accepts_what_has_no_fault_at_a_tag_or_visible_text(text: str) -> None:
    parts = split(text, MATH)
    assert render(Trajectory(parts.steps, parts.tail)) == text
    if faults := structure_faults(text, MATH):
        for fault in faults:
            begin = text[fault.character]
            assert begin.strip() if fault.kind is Fault.STRAY_TEXT else begin == "<"
        with pytest.raises(TrajectoryError) as error:
            parse(text, MATH)
        assert str(error.value) == str(faults[0])
    else:
        assert render(parse(text, MATH)) == text


@given(trajectories)
def test_rendered_trajectories_parse_back_equal(trajectory: Trajectory) -> None:
    assert parse(render(trajectory), MATH) == trajectory


@given(tag_soup)
def test_author_segments_cover_the_text_and_alternate(text: str) -> None:
    segments = author_segments(text, MATH)
    assert "".join(segment.text for segment in segments) == text
    assert all(segment.text for segment in segments)
    assert all(a.author is not b.author for a, b in pairwise(segments))


@pytest.mark.parametrize(
    "parts",
    [
        ("<code>1</code>", " \n<observation>o</observation>\n\n ", "<think>"),
        ("<code>1</code>", "<observation>o</observation>", "<think>t</think>"),
        ("", "\n<observation>a</observation>\n<observation>b</observation>\n"),
        ("<code>1</code>", "\n<observation>\nhalf"),
        ("<think>the <observation> said</think><plan>p</plan>",),
        # behind a role that is never closed
        ("<think>x <code>1</code>", "\n<observation>o</observation>\n", "<answer>1</answer>"),
    ],
)
def test_the_environment_wrote_observations_and_the_white_space_around_them(parts: tuple[str, ...]) -> None:
    """The parts are the agent's and the environment's in turn."""
    authors = [AGENT, ENVIRONMENT] * 2
    expected = [Segment(author, part) for author, part in zip(authors, parts, strict=False) if part]
    assert author_segments("".join(parts), MATH) == tuple(expected)


def test_agent_without_tools_wrote_everything() -> None:
    spec = AgentSpec(name="bare", roles={"answer": {"kind": "answer"}}, transitions={"start": ["answer"]})
    text = "<observation>x</observation>"
    assert author_segments(text, spec) == (Segment(AGENT, text),)


UNITS = ["<think>", "</think>", "<think></think>", "<x>", "<", "<a ", "</", "\n", "<think><plan></think>"]


@pytest.mark.parametrize("unit", [*UNITS, "\\boxed{", "a"])
def test_hostile_texts_take_linear_time(unit: str) -> None:
    text = unit * (200_000 // len(unit))
    started = time.process_time()
    structure_faults(text, MATH)
    author_segments(text, MATH)
    list(blocks(text))
    assert time.process_time() - started < 3
