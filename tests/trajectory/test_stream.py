from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afm.agents import load_agent
from afm.trajectory import Step, StepClosed, StepOpened, StreamEvent, StreamParser, observation_text
from afm.trajectory.tags import split

MATH = load_agent("math")

TAGS = [form.format(tag) for form in ("<{}>", "</{}>") for tag in MATH.roles]
pieces = st.lists(st.sampled_from([*TAGS, "<", "</", ">", "co", "de", " ", "é"]), max_size=30)


def offsets(steps: list[Step]) -> list[tuple[Step, int, int]]:
    return [(step, step.start, step.end) for step in steps]


def closed(events: list[StreamEvent]) -> list[Step]:
    return [event.step for event in events if isinstance(event, StepClosed)]


def test_events_come_when_their_tag_is_complete() -> None:
    parser = StreamParser(MATH)
    assert parser.feed("<pla") == []
    assert parser.feed("n>go") == [StepOpened("plan")]
    assert parser.open_role == "plan"
    assert parser.feed("</plan") == []
    assert parser.feed("> \n<think>") == [StepClosed(Step("plan", "go")), StepOpened("think")]
    assert parser.feed("x</think>") == [StepClosed(Step("think", "x", " \n"))]
    assert (parser.open_role, parser.position) == (None, 33)


def test_tool_tag_inside_a_thought_is_no_call() -> None:
    events = StreamParser(MATH).feed("<think>I could <code>1</code> here</think>")
    assert closed(events) == [Step("think", "I could <code>1</code> here")]


def test_observation_is_a_step_with_offsets_into_everything() -> None:
    parser = StreamParser(MATH)
    parser.feed("<code>1</code>")
    events = parser.feed_observation(observation_text("1", MATH, 100))
    assert closed(events) == [Step("observation", "\n1\n", "\n")]
    assert (closed(events)[0].start, closed(events)[0].end) == (15, 45)
    assert closed(parser.feed("<think>t</think>")) == [Step("think", "t", "\n")]


def test_characters_before_an_observation_never_join_its_tag() -> None:
    parser = StreamParser(MATH)
    parser.feed("<code>1</code><")
    assert parser.feed_observation("observation>x</observation>") == []
    assert closed(parser.feed("<plan></plan>")) == [Step("plan", "", "<observation>x</observation>")]


def test_observation_inside_an_open_role_is_refused() -> None:
    parser = StreamParser(MATH)
    parser.feed("<think>still")
    with pytest.raises(ValueError, match="while <think> is open"):
        parser.feed_observation("\n<observation>x</observation>\n")


@pytest.mark.slow
@given(pieces, st.integers(min_value=1, max_value=7))
def test_events_do_not_depend_on_how_the_text_is_cut(parts: list[str], width: int) -> None:
    text = "".join(parts)
    whole = StreamParser(MATH).feed(text)
    for chunks in (parts, list(text), [text[i : i + width] for i in range(0, len(text), width)]):
        parser = StreamParser(MATH)
        events = [event for chunk in chunks for event in parser.feed(chunk)]
        assert events == whole
        assert offsets(closed(events)) == offsets(closed(whole))
        assert parser.position == len(text)


@given(pieces)
def test_streamed_steps_are_the_parsed_steps(parts: list[str]) -> None:
    text = "".join(parts)
    assert offsets(closed(StreamParser(MATH).feed(text))) == offsets(list(split(text, MATH).steps))


@pytest.mark.parametrize("unit", ["<think>", "<think>a</think>", "<", "a"])
@pytest.mark.parametrize("width", [1, 1_000_000])
def test_work_is_linear_however_the_text_arrives(unit: str, width: int) -> None:
    text = "<plan>" + unit * (100_000 // len(unit))
    parser = StreamParser(MATH)
    started = time.process_time()
    for at in range(0, len(text), width):
        parser.feed(text[at : at + width])
    assert time.process_time() - started < 2
