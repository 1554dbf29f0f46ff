import pytest

from afm.errors import DataError


def test_a_batch_without_a_trained_token_is_refused_by_name(tiny):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("llamafactory")
    from llamafactory_patch import install

    install()
    from llamafactory.data import SFTDataCollatorWith4DAttentionMask
    from llamafactory.data.template import TEMPLATES

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    collate = SFTDataCollatorWith4DAttentionMask(tokenizer=tokenizer, template=TEMPLATES["qwen3_nothink"])
    ids = tokenizer.encode("What is 17 + 25?")

    def row(*labels):
        filled = [*labels, *[-100] * (len(ids) - len(labels))]
        return {"input_ids": list(ids), "attention_mask": [1] * len(ids), "labels": filled}

    assert collate([row(), row(-100, ids[1])])["labels"].shape == (2, len(ids))
    # the label at position 0 is predicted by nothing
    with pytest.raises(DataError, match=r"rows begin with 'What is 17 \+ 25\?'; 'What is 17 \+ 25\?'"):
        collate([row(), row(ids[0])])
