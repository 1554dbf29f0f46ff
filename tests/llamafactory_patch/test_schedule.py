"""The trainer's figures equal those predicted without a trainer."""

import pytest

from llamafactory_patch.doctor import training_steps, warmup_steps
from llamafactory_patch.engine import load_engine

CASES = [
    (20, {"per_device_train_batch_size": 2, "num_train_epochs": 1}),
    (21, {"per_device_train_batch_size": 2, "num_train_epochs": 2.5, "gradient_accumulation_steps": 4}),
    (21, {"per_device_train_batch_size": 2, "dataloader_drop_last": True, "warmup_ratio": 0.25}),
    (3, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 16, "warmup_steps": 0.03}),
    (9, {"max_steps": 7, "warmup_steps": 5}),
]


@pytest.mark.parametrize(("rows", "config"), CASES)
def test_steps_and_warm_up_are_the_trainers(rows, config, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **config)
    data = [{"x": n} for n in range(rows)]
    trainer = transformers.Trainer(model=torch.nn.Linear(1, 1), args=args, train_dataset=data)
    steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())[-1]
    assert training_steps(config, rows, 1) == steps
    assert warmup_steps(config, steps) == args.get_warmup_steps(steps)


@pytest.mark.parametrize(("val_size", "left"), [(0.5, 5), (3, 8), (0.01, 10), (0.0, 11)])
def test_validation_rows_are_those_that_llamafactory_splits_off(val_size, left):
    """Eleven rows: 5.5, 2.75 and 0.11 of them are rounded up."""
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("llamafactory")
    load_engine()
    from llamafactory_patch.data_check import validation_rows

    assert 11 - validation_rows(11, val_size) == left
    if val_size:
        rows = datasets.Dataset.from_dict({"x": list(range(11))})
        assert len(rows.train_test_split(test_size=val_size)["train"]) == left


def test_without_rows_only_max_steps_tells():
    assert training_steps({}, None, 8) is None
    assert training_steps({"max_steps": 5}, None, 8) == 5
    assert training_steps({"per_device_train_batch_size": 1, "num_train_epochs": 1}, 17, 8) == 3
