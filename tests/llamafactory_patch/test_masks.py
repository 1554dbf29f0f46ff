"""The authors of a text, and the resulting ids and masks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afm.agents import load_agent
from afm.choices import Boundary
from afm.errors import Fault, TrajectoryError
from afm.trajectory import author_segments
from llamafactory_patch.masks import TextEncoder, segments_by_tag

TAGS = ("observation",)


def by_author(text, tags=TAGS):
    return [(segment.author.value, segment.text) for segment in segments_by_tag(text, tags)]


def test_an_observation_takes_the_white_space_on_both_sides():
    assert by_author("<code>1</code>\n<observation>\n2\n</observation>\n\n<think>3</think>\n") == [
        ("agent", "<code>1</code>"),
        ("environment", "\n<observation>\n2\n</observation>\n\n"),
        ("agent", "<think>3</think>\n"),
    ]


def test_neighbouring_observations_are_one_segment():
    text = "<observation>1</observation> \n <observation>2</observation>"
    assert by_author(f"a{text}") == [("agent", "a"), ("environment", text)]
    assert by_author(text) == [("environment", text)]


def test_several_tags_may_be_the_environments_and_other_tags_inside_are_content():
    text = "x<seen>a <note>b</seen>y<note>c</note>"
    assert by_author(text, ("seen", "note")) == [
        ("agent", "x"),
        ("environment", "<seen>a <note>b</seen>"),
        ("agent", "y"),
        ("environment", "<note>c</note>"),
    ]


def test_text_without_observations_is_the_agents():
    for text in ("<observations> is another tag", "an observation > 3", "<observation is no tag>"):
        assert by_author(text) == [("agent", text)]
    assert by_author("") == []


@pytest.mark.parametrize(
    ("text", "kind", "character", "message"),
    [
        ("ab<observation>c", Fault.UNCLOSED, 2, "<observation> opened at character 2 is never closed"),
        ("ab</observation>", Fault.STRAY_CLOSE, 2, "</observation> at character 2 closes nothing"),
        ("<observation>a<observation>b", Fault.NESTED, 14, "opened again at character 14 before"),
    ],
)
def test_broken_tags_are_refused_with_their_place(text, kind, character, message):
    with pytest.raises(TrajectoryError) as caught:
        segments_by_tag(text, TAGS)
    assert (caught.value.kind, caught.value.character) == (kind, character)
    assert message in caught.value.message


@pytest.mark.parametrize(
    "tag", ["</OBSERVATION>", "< observation>", "<observation/>", '<observation\nfrom = "a b" to=c>']
)
def test_a_tag_written_in_another_way_is_refused_and_inside_of_an_observation_it_is_content(tag):
    with pytest.raises(TrajectoryError) as caught:
        segments_by_tag(f"ab{tag}c", TAGS)
    expected = "</observation>" if "/" in tag[:3] else "<observation>"
    assert caught.value.message == f"{tag} at character 2: expected {expected}"
    text = f"<observation>{tag}</observation>"
    assert by_author(text) == [("environment", text)]


PIECES = st.sampled_from(
    ["<think>a b</think>", "<code>1</code>", "<observation>x\ny</observation>", " ", "\n", "\t\n", "\u2003"]
)


@given(st.lists(PIECES, max_size=12).map("".join))
def test_sound_trajectories_are_split_as_by_the_agents_declaration(text):
    assert segments_by_tag(text, TAGS) == author_segments(text, load_agent("math"))


JOINT = ("</code>", "<observation>2</observation>", "<think>")


def test_texts_learned_ahead_are_encoded_as_single_ones(qwen_tokenizer):
    drafts = [[JOINT], [("<think>",)], [7, ("a", "b"), 8], [("", "b", "")], [("",)], []]
    ahead = TextEncoder(qwen_tokenizer, Boundary.SPLIT)
    ahead.learn(part for draft in drafts for part in draft if isinstance(part, tuple))
    single = [TextEncoder(qwen_tokenizer, Boundary.SPLIT).ids_and_mask(draft) for draft in drafts]
    assert [ahead.ids_and_mask(draft) for draft in drafts] == single
    assert single[2] == ([7, *qwen_tokenizer.encode("a"), *qwen_tokenizer.encode("b"), 8], [1, 1, 0, 1])
