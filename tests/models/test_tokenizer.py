import pytest

from afm.errors import ConfigError
from afm.models.tokenizer import ChatTokenizer, IncrementalDecoder, generation_end_ids


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    return ChatTokenizer.load(tiny_dir)


def test_texts_round_trip_without_special_tokens(tokenizer):
    text = " é 12\n\n</code> 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == []


def test_end_tokens_are_rendered_as_nothing_and_others_as_themselves(tokenizer):
    ids = tokenizer.encode("a<|im_end|>b<|im_start|>")
    assert tokenizer.decode(ids) == "ab<|im_start|>"
    assert tokenizer.end_ids == {2}
    assert tokenizer.end_id == 2


def test_prompts_go_through_the_template(tokenizer):
    ids = tokenizer.encode_prompt([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids) == "<|im_start|>user\nHi\n<|im_start|>assistant\n"


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


def test_a_decoder_begins_anew_after_its_end(tokenizer):
    decoder = IncrementalDecoder(tokenizer.decode)
    assert decoder.feed(tokenizer.encode("ab")) + decoder.finish() == "ab"
    assert decoder.feed(tokenizer.encode("cd")) + decoder.finish() == "cd"
