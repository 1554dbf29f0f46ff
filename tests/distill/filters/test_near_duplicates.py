import random
import sqlite3

import pytest

from afm.distill.filters import NearDuplicateSettings
from afm.distill.filters.near_duplicates import DuplicateIndex, Signer, _words, best_bands

pytest.importorskip("numpy")

WORDS = [f"word{number}" for number in range(5000)]


def text(seed, words=400):
    return random.Random(seed).choices(WORDS, k=words)


@pytest.fixture
def index():
    with sqlite3.connect(":memory:") as connection:
        yield DuplicateIndex(connection, NearDuplicateSettings())


def thinking(words):
    return " ".join(words)


def test_a_row_with_a_few_other_words_is_a_twin_and_a_new_one_is_not(wiki, row, index):
    signer = Signer(wiki, NearDuplicateSettings())
    words = text(1)
    changed = [*words[:200], "changed", *words[201:]]

    def twin(number, thought):
        return index.twin(number, f"row-{number}", signer.signature(row(thought=thinking(thought))))

    assert twin(1, words) is None
    found = twin(2, changed)
    assert (found.id, found.similarity > 0.9) == ("row-1", True)
    assert twin(3, text(2)) is None


def test_observations_do_not_make_a_twin(wiki, row, index):
    signer = Signer(wiki, NearDuplicateSettings())
    page = " ".join(text(3, 6000))

    for number in (1, 2):
        signature = signer.signature(row(thought=thinking(text(number)), found=page))
        assert index.twin(number, str(number), signature) is None


@pytest.mark.parametrize(("shared", "similarity"), [(0.95, 0.905), (0.5, 0.333)])
def test_the_estimate_is_near_the_true_jaccard_similarity(wiki, row, shared, similarity):
    """Two texts of n n-grams each with the share s in common: s / (2 - s)."""
    settings = NearDuplicateSettings(ngram=1, text="question", permutations=1024, threshold=0.01)
    signer = Signer(wiki, settings)
    common = int(shared * 1000)
    one = [f"a{number}" for number in range(1000)]
    other = one[:common] + [f"b{number}" for number in range(1000 - common)]
    with sqlite3.connect(":memory:") as connection:
        index = DuplicateIndex(connection, settings)
        assert index.twin(1, "one", signer.signature(row(question=" ".join(one)))) is None
        found = index.twin(2, "other", signer.signature(row(question=" ".join(other))))

    assert found.similarity == pytest.approx(similarity, abs=0.05)  # three standard errors


def test_all_of_many_planted_twins_are_found_and_nothing_else(wiki, row, index):
    signer = Signer(wiki, NearDuplicateSettings())
    found = {}
    for number in range(600):
        words = text(number // 2)
        if number % 2:
            words[7] = words[300] = "else"
        twin = index.twin(number, str(number), signer.signature(row(thought=thinking(words))))
        if twin is not None:
            found[number] = twin.id

    assert found == {number: str(number - 1) for number in range(1, 600, 2)}


def test_a_row_without_words_has_no_twin(wiki, row):
    signer = Signer(wiki, NearDuplicateSettings(text="question"))

    assert signer.signature(row(question="?")) == b""


def test_signatures_are_the_same_in_every_process(wiki, row):
    """They are written to disk and compared by a later process: a changed one would find no twin."""
    signature = Signer(wiki, NearDuplicateSettings(text="question")).signature(row(question="one two three"))

    assert signature[:9].hex() == "0914685d2b99ac0179"


def test_words_of_plain_and_of_other_texts_are_found_alike(wiki, row):
    """ASCII goes another way; a text with one more letter must give the same words before it."""
    every = "".join(map(chr, range(128))) + " Snake_case don't X-1 42nd\tTab\x1fUnit"

    assert _words(every) == _words(every + " ß")[:-1]
    assert _words(every + " Straße")[-1] == "strasse"


@pytest.mark.parametrize(
    ("threshold", "permutations"), [(0.8, 128), (0.5, 128), (0.9, 256), (0.95, 64), (0.2, 16)]
)
def test_bands_are_those_that_another_library_finds(threshold, permutations):
    lsh = pytest.importorskip("datasketch").MinHashLSH(threshold=threshold, num_perm=permutations)

    assert best_bands(threshold, permutations) == (lsh.b, lsh.r)
