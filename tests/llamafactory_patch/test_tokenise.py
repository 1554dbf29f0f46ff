"""Rows stored for a run: tokenised once, again after a change, and not confused with those of other runs."""

import pytest
from extras import needs

from afm.errors import DataError, EngineError

needs("llamafactory")

ROWS = [{"instruction": "Q?", "input": "", "output": f"<answer>{n}</answer>"} for n in range(4)]


@pytest.fixture
def provided(configuration, data_dir, tiny, tmp_path, monkeypatch):
    """Provide the rows of a run for a node; return their number, and when they were made."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from llamafactory_patch.engine import load_engine

    load_engine()
    from datasets import load_from_disk

    from llamafactory_patch.tokenise import ORIGIN_FILE, provide

    data_dir(ROWS)
    folder = tmp_path / "out/tokenized"

    def call(node=0, **options):
        config = configuration(tiny, tmp_path, do_train=True, **options)
        provide(config, folder, tmp_path / "out", node=node)
        rows = load_from_disk(str(folder))["train"]
        return len(rows), (folder / ORIGIN_FILE).stat().st_mtime_ns if (folder / ORIGIN_FILE).exists() else 0

    call.folder = folder
    return call


def test_rows_are_made_again_only_when_a_setting_has_changed(provided, tmp_path, capsys):
    rows, made = provided()
    assert rows == 4
    assert "training data: 4 sequences" in capsys.readouterr().out
    (tmp_path / "out/data_statistics.json").unlink()
    assert provided(preprocessing_num_workers=2) == (4, made)
    assert (tmp_path / "out/data_statistics.json").is_file()
    assert provided(max_samples=3)[0] == 3
    (provided.folder / "masking.json").unlink()  # like a folder of unknown origin
    assert provided()[0] == 4
    assert not (tmp_path / "out/.tokenized.part").exists()


def test_another_node_takes_what_the_first_has_stored(provided):
    with pytest.raises(EngineError, match=r"has no rows after ddp_timeout=0 s; check the log of node 0"):
        provided(node=1, ddp_timeout=0)
    made = provided()
    assert provided(node=1, ddp_timeout=0) == made
    with pytest.raises(EngineError, match=r"has rows of other settings \(seed: 42 -> 7\) after"):
        provided(node=1, ddp_timeout=0, seed=7)


def test_rows_tokenised_elsewhere_are_refused_when_nothing_of_one_is_trained_on(provided):
    from datasets import Dataset, DatasetDict

    def write(labels):
        ids = {"input_ids": [[5, 6, 7]] * 2, "attention_mask": [[1] * 3] * 2}
        rows = Dataset.from_dict({**ids, "labels": [[-100, 6, 7], labels]})
        DatasetDict({"train": rows}).save_to_disk(str(provided.folder))

    options = {"tokenized_path": str(provided.folder), "ignore_observation": False}
    write([5, -100, -100])  # no token predicts the label at position 0
    message = r"has a row \(train\) without a single trained token; it begins with"
    with pytest.raises(DataError, match=message):
        provided(**options)
    write([-100, -100, 7])
    assert provided(**options)[0] == 2


def test_flags_are_read_as_a_configuration():
    from llamafactory_patch.engine import load_engine

    load_engine()
    from llamafactory_patch.launcher import training_config

    words = ["--stage", "sft", "--learning_rate", "1e-4", "--do_train", "--ignore_observation", "True"]
    ours = {"ignore_observation": True}
    assert training_config(words) == {"stage": "sft", "learning_rate": 1e-4, "do_train": True} | ours
