from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afm.agents import AgentSpec, load_agent
from afm.trajectory import (
    Author,
    Segment,
    Step,
    Trajectory,
    author_segments,
    neutralise,
    observation_text,
    parse,
    render,
)
from afm.trajectory.tags import split

MATH = load_agent("math")

hostile = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *(f"<{tag}>" for tag in MATH.roles),
                *(f"</{tag}>" for tag in MATH.roles),
                "<",
                "</",
                ">",
                "\x00",
                "\x1b[31m",
                "observation",
                "</obser",
                "vation>",
                "<|im_end|>",
                "\r\n",
                "\u2028",
                "< think >",
                "<THINK>",
                "\ud800",
            ]
        ),
        st.text(max_size=4),
    ),
    max_size=20,
).map("".join)


def test_steps_render_with_their_white_space() -> None:
    trajectory = Trajectory((Step("plan", "a"), Step("think", "b", "\n")), " ")
    assert render(trajectory) == "<plan>a</plan>\n<think>b</think> "


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ("<think>", "[think]"),
        ("</observation>", "[/observation]"),
        ("</ Observation >", "[/ Observation ]"),
        ("<<answer>>", "<[answer]>"),
        ("<|im_end|><|endoftext|>", "[|im_end|][|endoftext|]"),
        ("a <b> c</b> x<y>z", "a <b> c</b> x<y>z"),
        ("1 <think 2", "1 <think 2"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("<thi\x00nk>", "[think]"),
        ("<thi\x1b[0mnk>", "[think]"),
        ("a\tb\r\nc\rd\x08\x7f\x85", "a\tb\nc\nd"),
        ("\ud800", "\ufffd"),
        ("naïve 🙂 \u200d", "naïve 🙂 \u200d"),
    ],
)
def test_untrusted_text_loses_tags_and_control_characters(text: str, harmless: str) -> None:
    assert neutralise(text, MATH) == harmless


@given(hostile)
def test_neutralised_text_cannot_open_or_close_a_role_in_any_surroundings(text: str) -> None:
    harmless = neutralise(text, MATH)
    assert split(harmless, MATH).steps == ()
    assert not any(f"</{tag}>" in harmless for tag in MATH.roles)
    assert len(harmless) <= len(text)
    assert neutralise(harmless, MATH) == harmless
    harmless.encode()


@given(hostile, st.integers(min_value=16, max_value=120))
def test_observation_is_one_step_by_the_environment_within_its_bound(text: str, max_chars: int) -> None:
    observation = observation_text(text, MATH, max_chars)
    (step,) = parse(observation, MATH).steps
    assert step.role == "observation"
    assert len(step.content) - 2 <= max_chars
    assert author_segments(f"<code>1</code>{observation}<think>", MATH) == (
        Segment(Author.AGENT, "<code>1</code>"),
        Segment(Author.ENVIRONMENT, observation),
        Segment(Author.AGENT, "<think>"),
    )


def test_observation_stands_on_lines_of_its_own() -> None:
    assert observation_text("4\n", MATH, 100) == "\n<observation>\n4\n</observation>\n"


def test_long_observation_keeps_head_and_tail_and_says_what_was_cut() -> None:
    observation = observation_text("a" * 500 + "b" * 500, MATH, 100)
    content = observation.removeprefix("\n<observation>\n").removesuffix("\n</observation>\n")
    head, mark, tail = content.partition("\n[... 931 characters cut ...]\n")
    assert (head, bool(mark), tail) == ("a" * 35, True, "b" * 34)


def test_very_small_bound_keeps_the_head() -> None:
    assert (
        observation_text("abcdefghijklmnopqrstuvwxyz", MATH, 16)
        == "\n<observation>\nabcdefghijklmno…\n</observation>\n"
    )


def test_agent_without_tools_has_no_observation() -> None:
    spec = AgentSpec.model_validate(
        {"name": "bare", "roles": {"answer": {"kind": "answer"}}, "transitions": {"start": ["answer"]}}
    )
    with pytest.raises(ValueError, match="no observation role"):
        observation_text("x", spec, 100)


def test_json_survives_neutralising() -> None:
    data = {"title": "a < b > c", "items": [1, 2], "html": "<p>x</p>"}
    assert json.loads(neutralise(json.dumps(data), MATH)) == data


@pytest.mark.parametrize("unit", ["<", "< ", "<think", "<|", "<|a", "</        ", "\x1b[", "\x1b[0;", "\x00"])
def test_hostile_results_take_linear_time(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    started = time.perf_counter()
    neutralise(text, MATH)
    assert time.perf_counter() - started < 5
