"""The data pipeline of a training run, with two tokenizers."""

import json
from pathlib import Path

import pytest
from sft_rows import CALL, SEEN

SAID = "<reflection>The result is 42.</reflection><answer>42</answer>"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Make a new tiny model with its tokenizer, as the quickstart does."""
    pytest.importorskip("transformers")
    from afm.models.tiny import create_tiny_model, train_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    texts = [f"Tom has {n} coins and finds {n + 8}. {CALL}{SEEN}{SAID}" for n in range(300)]
    train_tokenizer(texts, folder, vocab_size=400)
    create_tiny_model(folder, folder, seed=1, hidden_size=32, layers=1, heads=2, mlp=64)
    return folder


@pytest.fixture(scope="session")
def qwen(tmp_path_factory, tiny, qwen_folder):
    """Make a folder with the Qwen2.5 tokenizer, without weights."""
    folder = tmp_path_factory.mktemp("qwen")
    for path in [*qwen_folder.iterdir(), tiny / "config.json"]:
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="session", params=["tiny", "qwen"])
def model_dir(request):
    """Return the folder of each tokenizer in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def data_dir(tmp_path):
    """Write rows as a data set called ``rows``; return the folder."""

    def write(rows, *, name="rows.json", **info):
        text = json.dumps(rows, ensure_ascii=False)
        if name.endswith(".jsonl"):
            text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name).write_text(text, encoding="utf-8")
        entry = {"rows": {"file_name": name, **info}}
        (tmp_path / "dataset_info.json").write_text(json.dumps(entry), encoding="utf-8")
        return tmp_path

    return write


def configuration(model_dir, data_dir, **options):
    """Return the configuration of a fine-tuning on the data set ``rows`` of a folder, with its output there."""
    places = {"model_name_or_path": str(model_dir), "dataset_dir": str(data_dir), "dataset": "rows"}
    places |= {"cache_dir": str(data_dir / "cache"), "output_dir": str(data_dir / "out")}
    kind = {"template": "qwen3_nothink", "finetuning_type": "full", "report_to": "none"}
    return places | kind | {"ignore_observation": True} | options


@pytest.fixture(name="configuration")
def _configuration():
    return configuration


class Pipeline:
    """The rows that LLaMA-Factory would train on; with ``tokenized_path``, as stored there."""

    def __init__(self, model_dir, data_dir, **options):
        from llamafactory_patch.engine import load_engine, load_tools, parse_arguments

        load_engine()
        from datasets import load_from_disk

        from llamafactory_patch.reading import REPORT_FILE, BadRowReport
        from llamafactory_patch.tokenise import provide, tokenise

        training = {"stage": "sft", "do_train": True, "cutoff_len": 2048, "max_steps": 1}
        config = configuration(model_dir, data_dir, **training | options)
        arguments = parse_arguments(config)
        out, stored = data_dir / "out", options.get("tokenized_path")
        if stored:
            provide(config, Path(stored), out)
            self.sets = load_from_disk(stored)
        else:
            self.sets = tokenise(arguments, BadRowReport(arguments.sft.on_bad_rows, out / REPORT_FILE)).sets
        self.tokenizer = load_tools(arguments)[0]["tokenizer"]
        self.rows = list(self.sets["train"])

    def text(self, row, *, trained, side=""):
        """Decode the tokens of a row, or of one side of it, that have a label or that have none."""
        pairs = list(zip(row[f"{side}input_ids"], row[f"{side}labels"], strict=True))
        assert all(label in (-100, token) for token, label in pairs)
        return self.tokenizer.decode([token for token, label in pairs if (label != -100) is trained])

    def trained(self, side=""):
        """Return the text with loss of every row."""
        return [self.text(row, trained=True, side=side) for row in self.rows]

    def masked(self):
        """Return the text without loss of every row."""
        return [self.text(row, trained=False) for row in self.rows]


@pytest.fixture
def pipeline(monkeypatch):
    """Return :class:`Pipeline`, with hub access disabled."""
    pytest.importorskip("llamafactory")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("LLAMAFACTORY_VERBOSITY", "WARN")
    return Pipeline
