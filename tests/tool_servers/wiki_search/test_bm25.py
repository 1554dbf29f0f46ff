import json
import math
import random
from collections import Counter

import bm25s
import numpy as np
import pytest

from afm.datasets.encyclopaedia import generate
from afm.datasets.mini_world import WorldSplit
from tool_servers.wiki_search.bm25 import Bm25
from tool_servers.wiki_search.build import IndexPlan, build
from tool_servers.wiki_search.corpus import terms_of
from tool_servers.wiki_search.index import PassageStore
from tool_servers.wiki_search.search import fused


def by_hand(bags, query, k1=1.5, b=0.75):
    """Compute Lucene's BM25 passage by passage; a bag counts the words of a passage."""
    lengths = [sum(bag.values()) for bag in bags]
    mean = sum(lengths) / len(bags)
    scores = [0.0] * len(bags)
    for word in terms_of(query):
        holding = sum(word in bag for bag in bags)
        idf = math.log(1 + (len(bags) - holding + 0.5) / (holding + 0.5))
        for number, (bag, length) in enumerate(zip(bags, lengths, strict=True)):
            scores[number] += idf * bag[word] / (bag[word] + k1 * (1 - b + b * length / mean))
    return scores


def queries(world):
    tasks = list(generate(world, WorldSplit.TRAIN, 150, seed=2))
    return [task.question for task in tasks] + [
        f"{hop['asks']} {hop['title']}" for task in tasks for hop in task.extra_info["path"]
    ]


def test_scores_are_those_of_the_formula(world, index):
    store, engine = PassageStore(index), Bm25(index)
    bags = [Counter(terms_of(store[number].contents)) for number in range(len(store))]
    for query in random.Random(0).sample(queries(world), 12):
        expected = by_hand(bags, query)
        best = sorted(range(len(bags)), key=lambda n: (-expected[n], n))[:5]
        [hits] = engine.search([query], 5)
        assert [score for _, score in hits] == pytest.approx([expected[n] for n in best], rel=1e-4)


@pytest.mark.parametrize("k", [1, 3, 50])
def test_stopping_early_changes_nothing_against_bm25s_over_the_same_files(world, index, k):
    engine, other = Bm25(index), bm25s.BM25.load(index / "bm25", mmap=True)
    asked = queries(world)
    for query, hits in zip(asked, engine.search(asked, k), strict=True):
        words = [word for word in terms_of(query) if word in other.vocab_dict]
        _, scores = other.retrieve([words], k=k, show_progress=False)
        expected = [score for score in scores[0] if score > 0]
        assert np.allclose([score for _, score in hits], expected, rtol=1e-4)


@pytest.fixture
def engine_of(tmp_path):
    """Return the engine for these texts."""

    def built(*texts):
        corpus = tmp_path / "c.jsonl"
        corpus.write_text(
            "\n".join(json.dumps({"id": str(n), "contents": text}) for n, text in enumerate(texts))
        )
        build(IndexPlan(corpus, tmp_path / "i"), lambda *_: None)
        return Bm25(tmp_path / "i")

    return built


def test_repeated_words_count_and_unknown_ones_do_not(engine_of):
    asked = ["blue sea", "blue sea sea", "zebra", "", "the of"]
    once, twice, *without = engine_of("red fox", "blue fox", "red sea").search(asked, 50)
    assert [n for n, _ in once] == [1, 2]
    assert [n for n, _ in twice] == [2, 1]
    assert twice[0][1] == pytest.approx(2 * once[1][1])
    assert without == [[], [], []]


def test_equal_scores_come_in_the_order_of_the_corpus(engine_of):
    [hits] = engine_of(*["same words"] * 50).search(["same"], 7)
    assert [n for n, _ in hits] == list(range(7))


def test_fusion_adds_reciprocal_ranks():
    hits = fused([[(1, 9.0), (2, 8.0)], [(2, 0.5), (3, 0.4)]], 3)
    assert hits == [(2, 1 / 62 + 1 / 61), (1, 1 / 61), (3, 1 / 62)]
