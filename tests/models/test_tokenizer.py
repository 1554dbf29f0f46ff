import pytest

from afm.errors import ConfigError
from afm.models.tokenizer import (
    ChatTokenizer,
    IncrementalDecoder,
    StopMatcher,
    first_stop,
    generation_end_ids,
    stop_length,
)


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    return ChatTokenizer.load(tiny_dir)


def test_end_tokens_are_rendered_as_nothing_and_others_as_themselves(tokenizer):
    ids = tokenizer.encode("a<|im_end|>b<|im_start|>")
    assert tokenizer.decode(ids) == "ab<|im_start|>"
    assert tokenizer.end_ids == {2}
    assert tokenizer.end_id == 2


def test_a_rendered_chat_has_the_ids_of_the_tokenizer_whatever_its_file_cuts_off(tiny_dir):
    tokenizer = ChatTokenizer.load(tiny_dir)
    text = "<|im_start|>user\nZo\u00eb kauft \u5317\u4eac \U0001f642 12.5  x\ty <|im_end|>\n" * 9
    expected = tokenizer.backend.encode(text, add_special_tokens=False)
    backend = tokenizer.backend.backend_tokenizer
    backend.enable_truncation(max_length=5)
    backend.enable_padding(length=1000)
    assert tokenizer.encode_rendered(text) == expected


def test_the_generation_config_may_name_more_end_tokens(tiny_dir, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert generation_end_ids(tmp_path) == {0, 2}
    assert generation_end_ids(tiny_dir) == {2}
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ConfigError, match="generation_config"):
        generation_end_ids(tmp_path)


def test_folders_without_a_tokenizer_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        ChatTokenizer.load(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no tokenizer can be loaded"):
        ChatTokenizer.load(tmp_path)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_pieces_of_a_text_make_the_whole(tokenizer, size):
    ids = tokenizer.encode("Zoë kauft 北京 🙂🙂 \ufffd x")
    decoder = IncrementalDecoder(tokenizer.decode)
    pieces = [decoder.feed(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert all(not piece.endswith("\ufffd") for piece in pieces)
    assert "".join(pieces) + decoder.finish() == "Zoë kauft 北京 🙂🙂 \ufffd x"


def test_broken_bytes_come_out_as_the_whole_decode_shows_them():
    def decode(ids):
        return bytes(ids).decode(errors="replace")

    ids = [97, 0xE2, 0x82, 98, 0xFF, 0xC3, 0xA9, 0xE2]
    decoder = IncrementalDecoder(decode)
    text = "".join(decoder.feed([token]) for token in ids) + decoder.finish()
    assert text == decode(ids) == "a\ufffdb\ufffdé\ufffd"


WORDS = ["<", "/", "code", ">", ">\n", "</code", "a", "", "é", "\ufffd"]


def decode(ids):
    return "".join(WORDS[token] for token in ids)


def test_only_tokens_with_a_last_character_are_watched():
    matcher = StopMatcher(decode, len(WORDS))
    assert matcher.watch(("</code>", "<a")) == {3, 4, 6}
    assert matcher.watch(()) == frozenset()


def test_half_characters_are_watched_for_a_stop_that_ends_in_several_bytes():
    assert StopMatcher(decode, len(WORDS)).watch(("caf\u00e9",)) == {8, 9}


def test_a_stop_string_is_found_however_it_is_cut_into_tokens():
    matcher = StopMatcher(decode, len(WORDS))
    for ids in ([0, 1, 2, 3], [5, 3], [5, 4], [6, 6, 6, 6, 6, 6, 5, 7, 7, 7, 4]):
        assert matcher.completed(ids, ("</code>",))
    for ids in ([0, 2, 3], [5, 6, 3], [3]):
        assert not matcher.completed(ids, ("</code>",))


def test_the_tail_is_bounded():
    asked = []

    def logged(ids):
        asked.append(len(ids))
        return decode(ids)

    matcher = StopMatcher(logged, len(WORDS))
    matcher.watch(("</code>",))
    asked.clear()
    assert matcher.completed([6] * 10_000 + [5, 3], ("</code>",))
    assert max(asked) <= 7


def test_the_first_completed_stop_string_counts():
    assert first_stop("a</b></a>", ("</a>", "</b>")) == 5
    assert first_stop("abc", ("bc", "b")) == 2
    assert first_stop("abc", ("x",)) == -1


def test_the_token_that_completes_the_first_stop_string_is_the_last():
    stops = ("</code>", "a</")
    for ids, count in (
        ([6, 0, 1, 2, 3], 3),  # "a</" comes first: a < /
        ([2, 0, 1, 2, 3], 5),  # at the last token
        ([2, 0, 1, 2, 4, 5, 3], 5),  # ">\n" completes it; a second one behind it does not count
        ([2, 5, 3, 8, 6, 6, 6], 3),
        ([5, 5, 2, 3], None),
        ([], None),
    ):
        assert stop_length(decode, ids, stops) == count


def test_characters_in_pieces_are_put_together_before_stop_strings_are_looked_for():
    def bytewise(ids):
        return bytes(ids).decode(errors="replace")

    ids = list("a é b</é> c".encode())  # the stop string takes bytes 7 to 11
    assert stop_length(bytewise, ids, ("</é>",)) == 11
    assert stop_length(bytewise, ids, ("é",)) == 4
    assert stop_length(bytewise, ids[9:], ("é>",), before=ids[:9]) == 2  # the border cuts "é" in half


def test_a_stop_string_may_begin_in_the_tokens_before_but_not_end_there():
    assert stop_length(decode, [2, 3, 6], ("</code>",), before=[6, 0, 1]) == 2
    assert stop_length(decode, [6, 5, 3, 6], ("</code>",), before=[5, 3]) == 3
    assert stop_length(decode, [6, 6], ("</code>",), before=[5, 3]) is None
    assert stop_length(decode, [6], ("</code>",), before=[5, 3, 9]) is None
