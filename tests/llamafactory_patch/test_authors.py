import pytest

from afm.masking import Boundary
from llamafactory_patch.authors import AuthorTokenizer, ids_and_labels

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def qwen_tokenizer(qwen):
    return transformers.AutoTokenizer.from_pretrained(qwen)


def spelled(tokenizer, ids):
    """Every token as text, with a dash in front where the environment wrote it."""
    return [tokenizer.decode([token]) if token >= 0 else "-" + tokenizer.decode([~token]) for token in ids]


JOINT = "</code>|<observation>2</observation>|<think>"


@pytest.mark.parametrize(
    ("boundary", "expected"),
    [
        ("split", "</ code > -< -observation -> -2 -</ -observation -> <th ink >"),
        ("mask", "</ code ->< -observation -> -2 -</ -observation ->< think >"),
        ("keep", "</ code >< -observation -> -2 -</ -observation >< think >"),
    ],
)
def test_tokens_over_a_joint_follow_the_boundary(qwen_tokenizer, boundary, expected):
    tokenizer = AuthorTokenizer(qwen_tokenizer, Boundary(boundary))
    tokenizer.fence = "|"
    assert spelled(qwen_tokenizer, tokenizer.encode(JOINT)) == expected.split()


def test_collected_texts_are_encoded_as_single_ones(qwen_tokenizer):
    texts = [JOINT, "<think>", JOINT, "a|b", "|b|", ""]
    single = AuthorTokenizer(qwen_tokenizer, Boundary.SPLIT)
    bulk = AuthorTokenizer(qwen_tokenizer, Boundary.SPLIT)
    single.fence = bulk.fence = "|"
    bulk.collecting = True
    assert [bulk.encode(text) for text in texts] == [[]] * 6
    bulk.encode_collected()
    assert [bulk.encode(text) for text in texts] == [single.encode(text) for text in texts]


def test_ids_returned_can_be_changed_without_harm(qwen_tokenizer):
    tokenizer = AuthorTokenizer(qwen_tokenizer, Boundary.SPLIT)
    tokenizer.encode("abc").clear()
    assert tokenizer.encode("abc") == qwen_tokenizer.encode("abc")


def test_complemented_ids_come_back_without_a_label():
    # ~99 is -100, the value that already means "no label"
    assert ids_and_labels([7, ~99, ~0, 3], [-100, ~99, ~0, 3], -100) == ([7, 99, 0, 3], [-100, -100, -100, 3])
