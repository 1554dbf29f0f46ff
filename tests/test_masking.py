import unicodedata
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afm.agents import load_agent
from afm.choices import Boundary
from afm.errors import ConfigError
from afm.masking import MaskedIds, encode_batch, encode_continuation
from afm.trajectory import Author, Segment, author_segments, observation_text

MATH = load_agent("math")
AGENT, ENVIRONMENT = Author.AGENT, Author.ENVIRONMENT

Token = tuple[str, int]


@pytest.fixture(scope="session")
def qwen(qwen_tokenizer: Any) -> Any:
    return qwen_tokenizer


@pytest.fixture(scope="session")
def small() -> Any:
    """A byte-level BPE like Qwen's in kind, trained here on joints, so that it merges across them."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator(["<code>1</code><observation>1</observation><think>a</think>\n"] * 50, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core)


def encode_segments(
    tokenizer: Any, segments: Sequence[Segment], boundary: Boundary = Boundary.SPLIT
) -> MaskedIds:
    return encode_batch(tokenizer, [segments], boundary)[0]


def spelled(tokenizer: Any, text: str, boundary: Boundary) -> list[Token]:
    masked = encode_segments(tokenizer, author_segments(text, MATH), boundary)
    return [(tokenizer.decode([token]), mask) for token, mask in zip(masked.ids, masked.mask, strict=True)]


CALL = [("<", 1), ("code", 1), (">a", 1), ("</", 1), ("code", 1)]
THOUGHT_REST = [(">b", 1), ("</", 1), ("think", 1), (">", 1)]


OBSERVED = [("<", 0), ("observation", 0)]
CLOSED = [("</", 0), ("observation", 0)]


@pytest.mark.parametrize(
    ("boundary", "opening", "closing"),
    [
        (Boundary.SPLIT, [(">", 1), *OBSERVED], [(">", 0), ("<th", 1), ("ink", 1)]),
        (Boundary.MASK, [("><", 0), ("observation", 0)], [("><", 0), ("think", 1)]),
        (Boundary.KEEP, [("><", 1), ("observation", 0)], [("><", 1), ("think", 1)]),
    ],
)
def test_joint_without_white_space(
    qwen: Any, boundary: Boundary, opening: list[Token], closing: list[Token]
) -> None:
    text = "<code>a</code><observation>E</observation><think>b</think>"
    assert spelled(qwen, text, boundary) == CALL + opening + [(">E", 0)] + CLOSED + closing + THOUGHT_REST


def test_split_is_what_an_episode_appends(qwen: Any) -> None:
    """Sampled text, the observation as separate tokens, sampled text: the ids of training."""
    call, thought = "<plan>p</plan><think>t</think><code>1</code>", "<reflection>r</reflection>"
    observation = observation_text("1\n", MATH, 100)
    parts = [qwen.encode(part, add_special_tokens=False) for part in (call, observation, thought)]
    masked = encode_segments(qwen, author_segments(call + observation + thought, MATH))
    assert masked.ids == parts[0] + parts[1] + parts[2]
    assert masked.mask == [1] * len(parts[0]) + [0] * len(parts[1]) + [1] * len(parts[2])


letters = st.text(alphabet="ab <>/\n1é中🙂𒀀\u0301", max_size=6)
rows = st.lists(
    st.lists(
        st.builds(
            Segment, st.sampled_from(Author), st.one_of(letters, st.sampled_from([">", "<", "></", ">\n\n"]))
        ),
        max_size=6,
    ),
    max_size=4,
)


def trained_text(tokenizer: Any, ids: list[int], mask: list[int]) -> str:
    return str(tokenizer.decode([token for token, kept in zip(ids, mask, strict=True) if kept]))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=rows, which=st.sampled_from(["small", "qwen"]))
def test_split_trains_exactly_the_agents_text(
    request: pytest.FixtureRequest, data: list[list[Segment]], which: str
) -> None:
    tokenizer = request.getfixturevalue(which)
    for masked, row in zip(encode_batch(tokenizer, data), data, strict=True):
        joined = [Segment(AGENT, ""), *row]
        runs: list[Segment] = []
        for segment in joined:
            if runs and runs[-1].author is segment.author:
                runs[-1] = Segment(segment.author, runs[-1].text + segment.text)
            else:
                runs.append(segment)
        normal = (lambda text: unicodedata.normalize("NFC", text)) if which == "qwen" else str
        agent = [normal(run.text) for run in runs if run.author is AGENT]
        environment = [normal(run.text) for run in runs if run.author is ENVIRONMENT]
        assert trained_text(tokenizer, masked.ids, masked.mask) == "".join(agent)
        assert trained_text(tokenizer, masked.ids, [1 - kept for kept in masked.mask]) == "".join(environment)


@settings(max_examples=60, deadline=None)
@given(
    data=rows,
    which=st.sampled_from(["small", "qwen"]),
    boundary=st.sampled_from([Boundary.MASK, Boundary.KEEP]),
)
def test_mask_and_keep_leave_the_ids_alone_and_decide_straddling_tokens(
    request: pytest.FixtureRequest, data: list[list[Segment]], which: str, boundary: Boundary
) -> None:
    tokenizer = request.getfixturevalue(which)
    for masked, row in zip(encode_batch(tokenizer, data, boundary), data, strict=True):
        text = "".join(segment.text for segment in row)
        authors = [segment.author for segment in row for _ in segment.text]
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        decide = all if boundary is Boundary.MASK else any
        expected = [
            int(decide(author is AGENT for author in authors[start:stop]))
            for start, stop in encoded["offset_mapping"]
        ]
        assert masked.ids == encoded["input_ids"]
        assert masked.mask == expected


@pytest.mark.parametrize("boundary", list(Boundary))
def test_batch_equals_one_by_one(small: Any, boundary: Boundary) -> None:
    observed = "<observation>1</observation>"
    texts = [f"<code>1</code>\n{observed}\n", "", "<think>a</think>", observed]
    data = [author_segments(text, MATH) for text in texts]
    assert encode_batch(small, data, boundary) == [encode_segments(small, row, boundary) for row in data]
    assert encode_batch(small, [], boundary) == []


@pytest.mark.parametrize("boundary", list(Boundary))
def test_tokenizer_settings_for_padding_and_truncation_are_not_applied(
    small: Any, boundary: Boundary
) -> None:
    data = [author_segments("<think>a</think>" * count, MATH) for count in (1, 20)]
    before = encode_batch(small, data, boundary)
    small.pad_token = "a"
    small(["a", "a a a a"], padding=True, truncation=True, max_length=3)
    assert encode_batch(small, data, boundary) == before


def test_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="slow tokenizer, expected a fast one"):
        encode_segments(object(), [Segment(AGENT, "a")])


@pytest.mark.parametrize("component", ["Metaspace", "Prepend", "ByteLevel"])
def test_a_text_that_continues_another_gets_no_blank_before_it(component: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {"[UNK]": 0, "\u2581a": 1, "\u0120a": 2, "a": 3}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    if component == "Prepend":
        core.normalizer = tokenizers.normalizers.Prepend("\u2581")
    else:
        options = {"add_prefix_space": True} if component == "ByteLevel" else {"prepend_scheme": "always"}
        core.pre_tokenizer = getattr(tokenizers.pre_tokenizers, component)(**options)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")
    assert tokenizer.encode("a", add_special_tokens=False) == [2 if component == "ByteLevel" else 1]
    assert encode_continuation(tokenizer, "a") == [3]
