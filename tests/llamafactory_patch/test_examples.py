"""``afm mask TRAINING.yaml`` shows rows as the model gets them."""

import json

import pytest
import yaml
from sft_rows import PAIRS
from typer.testing import CliRunner

from afm.cli.commands import app
from afm.errors import ConfigError, DataError, UsageError

TEXT = "<think>T.</think><code>c</code>\n<observation>SEEN</observation>\n<answer>A</answer>"
TRAINED = "<think>T.</think><code>c</code><answer>A</answer>"
ROW = {"instruction": "Q", "input": "", "output": TEXT}


@pytest.fixture
def shown(configuration, data_dir, tiny, tmp_path, monkeypatch):
    """Call ``afm mask`` on a training run with ``row`` in a layout; return the lines of ``--json``."""
    pytest.importorskip("llamafactory")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def show(rows, formatting, *words, **info):
        folder = data_dir(rows, name="rows.jsonl", formatting=formatting, **info)
        config = tmp_path / "training.yaml"
        config.write_text(yaml.safe_dump(configuration(tiny, folder)), "utf-8")
        result = CliRunner().invoke(app, ["mask", str(config), "--json", *words], catch_exceptions=False)
        assert not (tmp_path / "out").exists()
        return [json.loads(line) for line in result.stdout.splitlines()]

    return show


def test_rows_packs_and_pairs_are_shown_as_they_would_be_trained_on(shown):
    statistics, example = shown([ROW] * 2, "alpaca", "--examples", "1")
    assert (statistics["sequences"], statistics["duplicates"]) == (2, 1)
    assert example["trained_text"].startswith(TRAINED)
    assert "SEEN" in example["masked_text"]
    assert "SEEN" not in example["trained_text"]
    statistics, *examples = shown([ROW] * 6, "alpaca", "neat_packing=true", "cutoff_len=4096")
    assert (statistics["rows"], statistics["sequences"], len(examples)) == (1, 6, 3)
    pair = {"instruction": "Q", "input": "", "chosen": TEXT, "rejected": "<answer>B</answer>"}
    statistics, chosen, rejected = shown([pair], "alpaca", "stage=dpo", **PAIRS)
    assert (statistics["rows"], statistics["sequences"]) == (1, 2)
    assert chosen["trained_text"].startswith(TRAINED)
    assert rejected["trained_text"].startswith("<answer>B")


def test_a_bad_row_is_named_and_what_does_not_fit_together_is_refused(shown, tmp_path):
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):
        shown([ROW, {**ROW, "output": 7}], "alpaca")
    with pytest.raises(UsageError, match="--tokenizer"):
        shown([ROW], "alpaca", "--tokenizer", str(tmp_path))
    with pytest.raises(ConfigError, match="got 'dpo', which trains on pairs"):
        shown([ROW], "alpaca", "stage=dpo")
    with pytest.raises(ConfigError, match="stage: the rows of 'ppo' have no labels"):
        shown(
            [ROW],
            "alpaca",
            "stage=ppo",
            "reward_model=none",
            "reward_model_type=full",
            "ignore_observation=false",
        )
    with pytest.raises(UsageError, match="takes overrides"):
        CliRunner().invoke(app, ["mask", str(tmp_path / "rows.jsonl"), "a=b"], catch_exceptions=False)
