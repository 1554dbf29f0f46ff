"""Sentence embeddings by the real library, of a tiny model with random weights."""

import pytest

from afm.agents import load_agent
from afm.rewards import Sample, load_reward
from afm.trajectory.tags import Author, Segment

WORDS = [*("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), *"{}':,.", "home", "search", "berlin", "place"]


@pytest.fixture
def folder(tmp_path):
    sentences = pytest.importorskip("sentence_transformers")
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(vocab_file=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(WORDS), **sizes)).save_pretrained(tmp_path / "bert")
    modules = [Transformer(str(tmp_path / "bert")), Pooling(16)]
    sentences.SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "model"))
    return tmp_path / "model"


@pytest.mark.slow
async def test_a_sentence_model_compares_thoughts_and_evidence_says_nothing_of_words(folder) -> None:
    reward = load_reward({"formula": "correct", "t_eval": {"embeddings": str(folder)}})
    item = {"kind": "reason", "form": "str", "template": {}, "tools": []}

    async def judged(reply):
        spec = load_agent("math")
        gold = {"thought": "search berlin", "name": "home.search"}
        segments = (Segment(Author.AGENT, reply),)
        return await reward.score(
            Sample(spec, "t_eval_reason_str", "q", segments, gold, extra_info={"t_eval": item})
        )

    same, other = await judged("search berlin"), await judged("place")
    await reward.close()
    assert same.score == 1.0
    assert 0 <= other.score < same.score
    assert "word counts" not in same.evidence
