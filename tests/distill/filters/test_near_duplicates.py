import random
import sqlite3
import tracemalloc

import pytest
from extras import needs

from afm.distill.filters.near_duplicates import (
    DuplicateIndex,
    NearDuplicateSettings,
    Signer,
    _words,
    bands_of,
)

needs("numpy")

WORDS = [f"word{number}" for number in range(5000)]


def text(seed, words=400):
    return random.Random(seed).choices(WORDS, k=words)


@pytest.fixture
def index():
    with sqlite3.connect(":memory:") as connection:
        yield DuplicateIndex(connection, NearDuplicateSettings())


def test_observations_do_not_make_a_twin(wiki, row, index):
    signer = Signer(wiki, NearDuplicateSettings())
    page = " ".join(text(3, 6000))

    for number in (1, 2):
        signature = signer.signature(row(thought=" ".join(text(number)), found=page))
        assert index.twin(number, str(number), signature) is None


def test_signatures_are_the_same_in_every_process(wiki, row):
    """They are written to disk and compared by a later process: a changed one would find no twin."""
    signature = Signer(wiki, NearDuplicateSettings(text="question")).signature(row(question="one two three"))

    assert signature[:9].hex() == "48e0353a164252a2e8"
    assert Signer(wiki, NearDuplicateSettings(text="question")).signature(row(question="?")) == b""


def test_words_of_plain_and_of_other_texts_are_found_alike(wiki, row):
    """ASCII goes another way; a text with one more letter must give the same words before it."""
    every = "".join(map(chr, range(128))) + " Snake_case don't X-1 42nd\tTab\x1fUnit"

    assert _words(every) == _words(every + " ß")[:-1]
    assert _words(every + " Straße")[-1] == "strasse"


def planted(wiki, row, settings, similarity, pairs, template=0.0):
    """Which of so many pairs are found whose similarity is that, to one word of about 200; words are the n-grams."""
    signer = Signer(wiki, settings)
    changed = round(200 * (1 - similarity) / (1 + similarity))  # J = (200 - changed) / (200 + changed)
    common = [f"template{number}" for number in range(round(200 * template))]
    found = []
    with sqlite3.connect(":memory:") as connection:
        index = DuplicateIndex(connection, settings)
        for pair in range(pairs):
            one = common + [f"{pair}one{number}" for number in range(200 - len(common))]
            places = random.Random(pair).sample(range(200), changed)
            other = [f"{pair}other{at}" if at in places else word for at, word in enumerate(one)]
            for number, words in ((2 * pair, one), (2 * pair + 1, other)):
                signature = signer.signature(row(question=" ".join(words)))
                twin = index.twin(number, str(number), signature)
                if twin is not None:
                    found.append((number, twin.id, twin.similarity))
    return found, (200 - changed) / (200 + changed)


def unigrams(**settings):
    return NearDuplicateSettings(ngram=1, text="question", **settings)


@pytest.mark.parametrize("threshold", [0.7, 0.8, 0.9])
def test_nine_of_ten_pairs_at_the_threshold_are_found_and_none_below(wiki, row, threshold):
    found, exact = planted(wiki, row, unigrams(threshold=threshold), threshold + 0.005, 150)
    below, less = planted(wiki, row, unigrams(threshold=threshold), threshold - 0.01, 50)

    assert less < threshold <= exact < threshold + 0.01
    assert len(found) >= 0.9 * 150
    assert {(number - int(twin), similarity) for number, twin, similarity in found} == {(1, exact)}
    assert below == []


def test_a_template_that_most_rows_share_hides_no_twins(wiki, row):
    """Hundreds of rows share bands that hold the template alone; the rarest bands tell which ones to compare."""
    found, _ = planted(wiki, row, unigrams(), 0.805, 200, template=0.8)

    assert len(found) >= 0.85 * 200
    assert all(number - int(twin) == 1 for number, twin, _ in found)


def test_of_long_rows_the_similarity_is_estimated(wiki, row, index):
    """3,000 words, 100 of them others: J = 2900 / 3100, estimated from the 1,024 smallest hashes."""
    signer = Signer(wiki, unigrams())
    words = [f"w{number}" for number in range(3000)]
    assert index.twin(1, "one", signer.signature(row(question=" ".join(words)))) is None
    words[::30] = [f"new{number}" for number in range(100)]
    found = index.twin(2, "two", signer.signature(row(question=" ".join(words))))

    assert found.similarity == pytest.approx(2900 / 3100, abs=0.03)  # four standard errors


@pytest.mark.parametrize(
    ("settings", "bands"),
    [
        ({}, (16, 8)),  # 1 - (1 - 0.8^8)^16 = 0.947; with 14 bands of 9 it would be 0.867
        ({"recall": 0.95}, (18, 7)),  # 0.985
        ({"threshold": 0.9, "permutations": 64}, (6, 10)),  # 1 - (1 - 0.9^10)^6 = 0.924; with 5 of 11 0.848
        ({"threshold": 0.1, "permutations": 16}, (16, 1)),  # 0.815: none finds nine of ten
    ],
)
def test_bands_are_the_longest_that_find_enough(settings, bands):
    assert bands_of(NearDuplicateSettings(**settings)) == bands


def test_chinese_rows_that_differ_in_a_letter_of_each_sentence_are_twins(wiki, row, index):
    signer = Signer(wiki, NearDuplicateSettings(ngram=2))
    letters = [chr(0x4E00 + number) for number in random.Random(5).sample(range(5000), 600)]

    def twin(number, changed):
        text = letters.copy()
        text[10::40] = changed * len(text[10::40])
        sentences = "".join(letter + ("\u3002" if at % 40 == 39 else "") for at, letter in enumerate(text))
        return index.twin(number, str(number), signer.signature(row(thought=sentences)))

    assert twin(1, "\u4e00") is None
    assert twin(2, "\u4e8c").similarity > 0.85


def test_a_long_row_takes_little_memory(wiki, row):
    """All its values at once were half a kilobyte for each n-gram."""
    signer = Signer(wiki, NearDuplicateSettings(text="question"))
    record = row(question=" ".join(f"w{number}" for number in range(100_000)))

    tracemalloc.start()
    signer.signature(record)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert most < 40e6
