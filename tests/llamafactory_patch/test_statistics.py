import json
import tracemalloc

import numpy as np
import pytest

from llamafactory_patch.statistics import RoleShare, count_tokens, first_without_label, rendered, show_data

WORDS = [
    "<pad>",
    "ask",
    "<think>",
    "a",
    "</think>",
    "<code>",
    "run",
    "</code>",
    "<observation>",
    "out",
    "</observation>",
    "<end>",
    "é",
]
ID = {word: number for number, word in enumerate(WORDS)}


class Letters:
    """One token per word."""

    def decode(self, ids):
        return "".join(WORDS[token] for token in ids)

    def batch_decode(self, rows):
        return [self.decode(row) for row in rows]


def sequence(words, masked):
    ids = [ID[word] for word in words.split()]
    hidden = {ID[word] for word in masked.split()}
    return ids, [-100 if token in hidden else token for token in ids]


CALL = sequence(
    "ask ask <think> a é </think> <code> run run run </code> <observation> out out </observation> <end>",
    masked="ask <observation> out </observation>",
)
SHORT = sequence("ask <think> a </think> <end>", masked="ask")


def rows(*pairs, **more):
    datasets = pytest.importorskip("datasets")
    ids, labels = zip(*pairs, strict=True)
    return datasets.Dataset.from_dict({"input_ids": list(ids), "labels": list(labels), **more})


def test_counts_are_those_of_the_trained_tokens():
    counted = count_tokens(rows(CALL, SHORT, SHORT), Letters(), cutoff_len=16)
    assert (counted.rows, counted.sequences, counted.tokens) == (3, 3, 16 + 5 + 5)
    assert counted.trained == 10 + 4 + 4
    assert counted.length_percentiles == (5, 5, 16, 16)
    assert counted.at_cutoff == 1
    assert counted.duplicates == 1
    assert counted.roles == {
        "(prompt)": RoleShare(4, 0),
        "think": RoleShare(4 + 3 + 3, 4 + 3 + 3),
        "code": RoleShare(5, 5),
        "observation": RoleShare(4, 0),
        "(between)": RoleShare(3, 3),
    }


def test_memory_does_not_grow_with_the_data():
    """4,000 sequences of 250 tokens have 16 MB of ids and labels, which must not be in memory at once."""
    data = rows(*[([3] * 250, [3] * 250)] * 4000)
    tracemalloc.start()
    counted = count_tokens(data, Letters(), cutoff_len=250)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert counted.tokens == 1_000_000
    assert counted.sampled == 2000
    assert peak < 6_000_000


def test_packs_are_taken_apart_and_padding_does_not_count():
    (long_ids, long_labels), (ids, labels) = CALL, SHORT
    pack = (long_ids + ids + [0, 0, 0], long_labels + labels + [-100] * 3)
    positions = [[*range(16), *range(5), 0, 0, 0]]
    counted = count_tokens(rows(pack, position_ids=positions), Letters(), cutoff_len=23)
    assert (counted.rows, counted.sequences, counted.tokens, counted.trained) == (1, 2, 21, 14)
    assert counted.length_percentiles[3] == 16


def test_a_tag_that_the_prompt_explains_is_prompt():
    pair = sequence("ask <think> <end> <think> a </think>", masked="ask <end>")
    pair = (pair[0], [-100] * 3 + pair[1][3:])
    counted = count_tokens(rows(pair), Letters(), cutoff_len=99)
    assert counted.roles == {"(prompt)": RoleShare(3, 0), "think": RoleShare(3, 3)}


def test_masked_text_is_marked_and_long_stretches_lose_their_middle():
    ids, labels = (np.array(values) for values in CALL)
    assert rendered(ids, labels, Letters()) == (
        "⟦askask⟧<think>aé</think><code>runrunrun</code>⟦<observation>outout</observation>⟧<end>"
    )
    assert "⟦<obse [... 23 characters ...] tion>⟧" in rendered(ids, labels, Letters(), max_chars=10)


def test_numbers_and_three_examples_are_printed_and_saved(tmp_path, capsys):
    show_data(rows(SHORT, SHORT, SHORT, CALL, SHORT, SHORT), Letters(), 16, tmp_path / "new")
    shown = capsys.readouterr().out
    assert "6 sequences, 41 tokens, 73.2 % trained on" in shown
    assert "observation          9.8 % of the tokens,   0.0 % of them trained on" in shown
    saved = json.loads((tmp_path / "new/data_statistics.json").read_text("utf-8"))
    assert saved["roles"]["code"] == {"tokens": 5, "trained": 5}
    examples = (tmp_path / "new/data_examples.txt").read_text("utf-8")
    assert examples.count("⟦ask⟧<think>a</think><end>") == 2
    assert "--- sequence 4: 16 tokens" in examples


@pytest.mark.parametrize(("total", "longest"), [(2, 0), (6, 5)])
def test_there_are_three_examples_wherever_the_longest_stands(total, longest, tmp_path):
    show_data(rows(*(CALL if row == longest else SHORT for row in range(total))), Letters(), 16, tmp_path)
    examples = (tmp_path / "data_examples.txt").read_text("utf-8")
    assert examples.count("--- sequence") == min(3, total)
    assert f"--- sequence {longest + 1}: 16 tokens" in examples


def test_both_sides_of_a_pair_are_counted_and_shown(tmp_path, capsys):
    datasets = pytest.importorskip("datasets")
    sides = {"chosen": CALL, "rejected": SHORT}
    columns = {f"{side}_input_ids": [pair[0]] * 2 for side, pair in sides.items()}
    columns |= {f"{side}_labels": [pair[1]] * 2 for side, pair in sides.items()}
    show_data(datasets.Dataset.from_dict(columns), Letters(), 16, tmp_path)
    counted = json.loads((tmp_path / "data_statistics.json").read_text("utf-8"))
    assert (counted["rows"], counted["sequences"], counted["trained"]) == (2, 4, 2 * (10 + 4))
    assert "4 sequences in 2 rows, 42 tokens" in capsys.readouterr().out


def test_what_a_terminal_would_obey_is_printed_as_a_picture(tmp_path, capsys):
    class Hostile(Letters):
        def decode(self, ids):
            return "\x1b[2J"

    show_data(rows(CALL), Hostile(), 16, tmp_path)
    assert "␛[2J" in capsys.readouterr().out


def test_a_sequence_without_a_label_that_counts_is_found():
    """No token predicts the label at position 0."""
    ids = [1, 2, 3]
    assert first_without_label(rows((ids, [-100, 2, -100]))) is None
    assert first_without_label(rows((ids, ids), (ids, [1, -100, -100]))).tolist() == ids


def test_a_data_set_without_rows_is_an_error():
    with pytest.raises(ValueError, match="no row"):
        count_tokens(rows(SHORT).select([]), Letters(), 16)
