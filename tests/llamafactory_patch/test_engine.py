"""The import of LLaMA-Factory, and the fixes of three bugs in its dependencies."""

import sys
from itertools import chain

import pytest
from extras import needs

from afm.errors import ConfigError, EngineError
from llamafactory_patch.engine import (
    group_by_length_again,
    load_engine,
    load_tools,
    parse_arguments,
    restore_numbered_cpu,
)

needs("llamafactory")


def test_another_version_of_llamafactory_is_refused(tmp_path, monkeypatch):
    metadata = tmp_path / "llamafactory-0.9.4.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: llamafactory\nVersion: 0.9.4\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    message = r"llamafactory 0.9.4 is installed.*pip install llamafactory==0.9.5"
    with pytest.raises(EngineError, match=message):
        load_engine()


def test_torchaudio_stays_unavailable_after_its_absence_was_bridged():
    import importlib.util

    if "torchaudio" not in sys.modules and importlib.util.find_spec("torchaudio"):
        pytest.skip("torchaudio is installed")
    load_engine()
    import llamafactory.data.mm_plugin
    from transformers.utils import is_torchaudio_available

    assert llamafactory.data.mm_plugin
    assert "torchaudio" not in sys.modules
    assert not is_torchaudio_available()


def test_checkpoints_load_onto_a_numbered_cpu(tmp_path, monkeypatch):
    """The error shows that the fix is still needed."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.serialization, "_package_registry", [*torch.serialization._package_registry])
    torch.save({"a": torch.arange(3)}, tmp_path / "t.pt")
    onto = {"map_location": torch.device("cpu:0"), "weights_only": True}
    with pytest.raises(RuntimeError, match="don't know how to restore data location"):
        torch.load(tmp_path / "t.pt", **onto)
    restore_numbered_cpu()
    restore_numbered_cpu()
    assert torch.load(tmp_path / "t.pt", **onto)["a"].tolist() == [0, 1, 2]


def test_a_resumed_training_groups_the_same_rows_by_length(tmp_path, monkeypatch):
    """The checkpoint is in the second epoch."""
    torch = pytest.importorskip("torch")
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Linear):
        def forward(self, input_ids):
            return {"loss": self.weight.sum() * input_ids.float().mean()}

    rows = [{"input_ids": [number] * (number % 7 + 1)} for number in range(40)]
    seen = []

    def collate(batch):
        seen.append([row["input_ids"][0] for row in batch])
        return {"input_ids": torch.tensor([row["input_ids"][0] for row in batch])}

    def train(checkpoint=None):
        seen.clear()
        arguments = TrainingArguments(
            str(tmp_path), train_sampling_strategy="group_by_length", per_device_train_batch_size=4, max_steps=25,
            save_steps=15, use_cpu=True, report_to="none", seed=5, disable_tqdm=True, dataloader_pin_memory=False,
            remove_unused_columns=False,
        )  # fmt: skip
        Trainer(Model(1, 1), arguments, collate, rows).train(resume_from_checkpoint=checkpoint)
        return list(seen)

    monkeypatch.setattr(Trainer, "_get_train_sampler", Trainer._get_train_sampler)
    group_by_length_again()
    group_by_length_again()
    whole = train()
    assert sorted(chain(*whole[:10])) == sorted(chain(*whole[10:20])) == list(range(40))
    assert whole[:10] != whole[10:20]
    assert train(f"{tmp_path}/checkpoint-15")[-10:] == whole[-10:]


@pytest.fixture(scope="module")
def parse():
    """Parse the arguments of a configuration."""
    load_engine()

    def parsed(**options):
        return parse_arguments({"model_name_or_path": "m", "dataset": "a", "do_train": True, **options})

    return parsed


def test_the_mask_is_off_unless_asked_for(parse):
    own = parse().sft
    assert not own.ignore_observation
    assert (own.ignore_observation_token, own.observation_boundary) == (("observation",), "split")
    assert parse(ignore_observation_token="seen, heard").sft.ignore_observation_token == ("seen", "heard")


def test_a_system_prompt_stays_with_its_configuration(parse, tiny):
    options = {"model_name_or_path": str(tiny), "template": "llama3", "dataset_dir": str(tiny)}
    for system in ("Be brief.", ""):
        given = {"default_system": system} if system else {}
        assert load_tools(parse(**options, **given))[1].default_system == system


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignore_observation_token": "<observation>"}, "expected names of tags without brackets"),
        ({"ignore_observation_token": "a,,b"}, "expected names of tags without brackets"),
        ({"ignore_observation_token": ""}, "expected the name of a tag, or several"),
        ({"observation_boundary": "cut"}, "observation_boundary: got 'cut'"),
        ({"ignore_observations": True}, "ignore_observations"),
        ({"ignore_observation": True, "train_on_prompt": True}, "set train_on_prompt=false"),
        ({"template": "absent"}, "Template absent|has no 'absent'"),
        ({"streaming": True, "max_steps": 1}, "streaming: rows are tokenised and stored before the run"),
    ],
)
def test_what_contradicts_itself_or_is_unknown_is_refused(parse, options, message):
    with pytest.raises(ConfigError, match=message):
        parse(**options)
