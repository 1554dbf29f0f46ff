"""``afm mask TRAINING.yaml``: rows of every layout as a training gets them."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from afm.cli.main import app
from afm.errors import ConfigError, DataError, UsageError

TEXT = "<think>T.</think><code>c</code>\n<observation>SEEN</observation>\n<answer>A</answer>"
TRAINED = "<think>T.</think><code>c</code><answer>A</answer>"
SEGMENTS = [
    {"author": "agent", "text": "<plan>P.</plan><think>T.</think><code>```py\nprint(1)\n```</code>"},
    {"author": "environment", "text": "\n<observation>SEEN</observation>\n"},
    {"author": "agent", "text": "<reflection>R.</reflection><think>T.</think><answer>\\boxed{1}</answer>"},
]
CALLED = {"type": "function", "function": {"name": "look", "arguments": "{}"}, "id": "1"}
LAYOUTS = {
    "alpaca": ({"instruction": "Q", "input": "", "output": TEXT}, TRAINED),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": TEXT}]},
        TRAINED,
    ),
    "trajectory": (
        {"id": "a", "agent": "math", "agent_digest": "d", "question": "Q", "segments": SEGMENTS},
        SEGMENTS[0]["text"] + SEGMENTS[2]["text"],
    ),
    "openai_messages": (
        {
            "messages": [
                {"role": "user", "content": "Q"},
                {"role": "assistant", "content": "I look.", "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "1", "content": "SEEN"},
                {"role": "assistant", "content": "A"},
            ]
        },
        'I look.\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>A',
    ),
    "agent_flan": (
        {
            "conversation": [
                {"role": "user", "content": "Q SEEN", "loss": False},
                {"role": "assistant", "content": "A", "loss": True},
            ]
        },
        "A",
    ),
}


@pytest.fixture
def shown(data_dir, tiny, tmp_path, monkeypatch):
    """Calls ``afm mask`` on a training with ``row`` in a layout; returns the lines of ``--json``."""
    pytest.importorskip("llamafactory")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def show(rows, formatting, *words, template="qwen3_nothink", **info):
        folder = data_dir(rows, name="rows.jsonl", formatting=formatting, **info)
        config = tmp_path / "training.yaml"
        settings = {
            "model_name_or_path": str(tiny),
            "dataset_dir": str(folder),
            "dataset": "rows",
            "cache_dir": str(tmp_path / "cache"),
            "output_dir": str(tmp_path / "out"),
            "template": template,
            "ignore_observation": True,
            "finetuning_type": "full",
            "report_to": "none",
        }
        config.write_text(yaml.safe_dump(settings), "utf-8")
        result = CliRunner().invoke(app, ["mask", str(config), "--json", *words], catch_exceptions=False)
        assert not (tmp_path / "out").exists()
        return [json.loads(line) for line in result.stdout.splitlines()]

    return show


@pytest.mark.parametrize("formatting", LAYOUTS)
def test_every_layout_is_shown_as_it_would_be_trained_on(shown, formatting):
    row, trained = LAYOUTS[formatting]
    words = ["resize_vocab=true"] if formatting == "agent_flan" else []
    template = {"agent_flan": "agent_flan", "openai_messages": "qwen"}.get(formatting, "qwen3_nothink")
    statistics, example = shown([row, row], formatting, *words, "--examples", "1", template=template)
    assert (statistics["sequences"], statistics["duplicates"]) == (2, 1)
    assert example["trained_text"].startswith(trained)
    assert "SEEN" in example["masked_text"]
    assert "Q" in example["masked_text"]
    assert "SEEN" not in example["trained_text"]


def test_packs_and_pairs_are_shown_too(shown):
    row = LAYOUTS["alpaca"][0]
    statistics, *examples = shown([row] * 6, "alpaca", "neat_packing=true", "cutoff_len=4096")
    assert (statistics["rows"], statistics["sequences"], len(examples)) == (1, 6, 3)
    pair = {"instruction": "Q", "input": "", "chosen": TEXT, "rejected": "<answer>B</answer>"}
    columns = {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}
    statistics, chosen, rejected = shown([pair], "alpaca", "stage=dpo", ranking=True, columns=columns)
    assert (statistics["rows"], statistics["sequences"]) == (1, 2)
    assert chosen["trained_text"].startswith(TRAINED)
    assert rejected["trained_text"].startswith("<answer>B")


def test_a_bad_row_is_named_and_what_does_not_fit_together_is_refused(shown, tmp_path):
    row = LAYOUTS["alpaca"][0]
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):
        shown([row, {**row, "output": 7}], "alpaca")
    with pytest.raises(UsageError, match="--tokenizer"):
        shown([row], "alpaca", "--tokenizer", str(tmp_path))
    with pytest.raises(ConfigError, match="got 'dpo', which trains on pairs"):
        shown([row], "alpaca", "stage=dpo")
    with pytest.raises(UsageError, match="takes overrides"):
        CliRunner().invoke(app, ["mask", str(tmp_path / "rows.jsonl"), "a=b"], catch_exceptions=False)
