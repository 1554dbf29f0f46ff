"""From texts of two authors to ids and masks."""

import pytest

from afm.masking import Boundary

transformers = pytest.importorskip("transformers")
pytest.importorskip("llamafactory")


@pytest.fixture(scope="module")
def qwen_tokenizer(qwen):
    return transformers.AutoTokenizer.from_pretrained(qwen)


@pytest.fixture(scope="module")
def encoder():
    from llamafactory_patch.engine import load_engine

    load_engine()
    from llamafactory_patch.encoding import TextEncoder

    return TextEncoder


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
def test_tokens_over_a_joint_follow_the_boundary(encoder, qwen_tokenizer, boundary, expected):
    ids, mask = encoder(qwen_tokenizer, Boundary(boundary)).ids_and_mask([JOINT])
    assert spelled(qwen_tokenizer, ids, mask) == expected.split()


def test_texts_learned_ahead_are_encoded_as_single_ones(encoder, qwen_tokenizer):
    drafts = [[JOINT], [("<think>",)], [7, ("a", "b"), 8], [("", "b", "")], [("",)], []]
    ahead = encoder(qwen_tokenizer, Boundary.SPLIT)
    ahead.learn(part for draft in drafts for part in draft if isinstance(part, tuple))
    single = [encoder(qwen_tokenizer, Boundary.SPLIT).ids_and_mask(draft) for draft in drafts]
    assert [ahead.ids_and_mask(draft) for draft in drafts] == single
    assert single[2] == ([7, *qwen_tokenizer.encode("a"), *qwen_tokenizer.encode("b"), 8], [1, 1, 0, 1])
