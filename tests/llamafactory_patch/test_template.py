"""From texts of two authors to ids and masks."""

import pytest

from afm.masking import Boundary
from llamafactory_patch.template import TextEncoder

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def qwen_tokenizer(qwen):
    return transformers.AutoTokenizer.from_pretrained(qwen)


def spelled(tokenizer, ids, mask):
    """Every token as text, with a dash in front where the environment wrote it."""
    return [("" if kept else "-") + tokenizer.decode([token]) for token, kept in zip(ids, mask, strict=True)]


JOINT = ("</code>", "<observation>2</observation>", "<think>")


@pytest.mark.parametrize(
    ("boundary", "expected"),
    [
        ("split", "</ code > -< -observation -> -2 -</ -observation -> <th ink >"),
        ("mask", "</ code ->< -observation -> -2 -</ -observation ->< think >"),
        ("keep", "</ code >< -observation -> -2 -</ -observation >< think >"),
    ],
)
def test_tokens_over_a_joint_follow_the_boundary(qwen_tokenizer, boundary, expected):
    ids, mask = TextEncoder(qwen_tokenizer, Boundary(boundary)).ids_and_mask([JOINT])
    assert spelled(qwen_tokenizer, ids, mask) == expected.split()


def test_texts_learned_ahead_are_encoded_as_single_ones(qwen_tokenizer):
    drafts = [[JOINT], [("<think>",)], [7, ("a", "b"), 8], [("", "b", "")], [("",)], []]
    ahead = TextEncoder(qwen_tokenizer, Boundary.SPLIT)
    ahead.learn(part for draft in drafts for part in draft if isinstance(part, tuple))
    single = [TextEncoder(qwen_tokenizer, Boundary.SPLIT).ids_and_mask(draft) for draft in drafts]
    assert [ahead.ids_and_mask(draft) for draft in drafts] == single
    assert single[2] == ([7, *qwen_tokenizer.encode("a"), *qwen_tokenizer.encode("b"), 8], [1, 1, 0, 1])
