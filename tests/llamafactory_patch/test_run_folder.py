import json
import re
import threading
from pathlib import Path

import pytest
import yaml

from afm.agents import load_agent
from afm.errors import ConfigError
from afm.processes import KEPT_MEMORY
from afm.terminal import ProgressView
from llamafactory_patch import run_folder
from llamafactory_patch.config import SftJob
from llamafactory_patch.launcher import run_sft, show_steps


@pytest.fixture
def job(tmp_path):
    def make(**config):
        return SftJob({"output_dir": str(tmp_path), "seed": 1, **config}, tmp_path, agent=load_agent("math"))

    return make


def checkpoint(folder, step, state=None):
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    text = json.dumps({"global_step": step}) if state is None else state
    (path / "trainer_state.json").write_text(text, encoding="utf-8")


def prepared(job):
    note = run_folder.prepare(job, progress_bar=False)
    return yaml.safe_load(run_folder.config_path(job).read_text("utf-8")), note


def test_a_first_start_is_told_to_resume_nothing(job):
    config, note = prepared(job())
    assert config == {"disable_tqdm": True, "output_dir": str(job().output_dir), "seed": 1}
    assert note == ""
    config, note = prepared(job())
    assert note == "it was interrupted before its first checkpoint, and starts from the beginning"
    assert config["overwrite_output_dir"] is True


def test_training_continues_from_the_last_complete_checkpoint(job, tmp_path):
    prepared(job())
    checkpoint(tmp_path, 90)
    checkpoint(tmp_path, 100)
    checkpoint(tmp_path, 110, state='{"global_st')
    steps = [{"current_steps": step, "loss": 1.0} for step in (50, 100, 105)]
    history = "".join(json.dumps(step) + "\n" for step in steps) + '{"current'
    (tmp_path / "trainer_log.jsonl").write_text(history, encoding="utf-8")
    config, note = prepared(job())
    assert config["resume_from_checkpoint"] == str(tmp_path / "checkpoint-100")
    assert "continuing from" in note
    assert "checkpoint-110 was not saved completely; renamed to incomplete-checkpoint-110" in note
    assert not (tmp_path / "checkpoint-110").exists()
    kept = (tmp_path / "trainer_log.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["current_steps"] for line in kept] == [50, 100]


def test_a_history_that_the_trainer_deletes_while_it_is_read_is_empty(tmp_path):
    """The trainer of a run that begins anew deletes the history of the run before it."""
    history, ended = tmp_path / "trainer_log.jsonl", threading.Event()

    def replace():
        while not ended.is_set():
            history.write_text('{"current_steps": 10}\n')
            history.unlink()

    trainer = threading.Thread(target=replace)
    trainer.start()
    try:
        seen = [run_folder.last_logged(history) for _ in range(5000)]
    finally:
        ended.set()
        trainer.join()
    assert all(row in (None, {"current_steps": 10}) for row in seen)


def test_another_node_comes_to_the_same_checkpoint_and_leaves_the_folder_alone(job, tmp_path):
    checkpoint(tmp_path, 90)
    checkpoint(tmp_path, 100, state="{")
    history = tmp_path / "trainer_log.jsonl"
    history.write_text('{"current_steps": 95, "loss": 1.0}\n', encoding="utf-8")
    run_folder.prepare(job(), node=1, progress_bar=False)
    config = yaml.safe_load((tmp_path / "sft_config.node1.yaml").read_text("utf-8"))
    assert config["resume_from_checkpoint"] == str(tmp_path / "checkpoint-90")
    assert not run_folder.config_path(job()).exists()
    assert (tmp_path / "checkpoint-100").exists()
    assert "95" in history.read_text("utf-8")


def test_starting_anew_sets_checkpoints_aside_for_good(job, tmp_path):
    """After an interruption, it starts over or continues from its own checkpoints, never from those of the old training."""
    checkpoint(tmp_path, 100)
    config, note = prepared(job(overwrite_output_dir=True, seed=2))
    assert "resume_from_checkpoint" not in config
    assert note.endswith("checkpoint-100 belongs to an earlier training; renamed to replaced-checkpoint-100")
    config, _ = prepared(job(seed=2))
    assert "resume_from_checkpoint" not in config
    checkpoint(tmp_path, 50)
    config, _ = prepared(job(seed=2))
    assert config["resume_from_checkpoint"] == str(tmp_path / "checkpoint-50")


def test_a_finished_training_is_known_and_guarded(job, tmp_path):
    (tmp_path / "config.json").write_text('{"use_cache": false, "hidden_size": 8}', encoding="utf-8")
    assert not run_folder.is_finished(job())
    run_folder.finish(job(), seconds=1.0)
    assert run_folder.is_finished(job(logging_steps=7, resume_from_checkpoint="checkpoint-1"))
    with pytest.raises(ConfigError, match=r"other settings \(seed: 1 -> 2\).*overwrite_output_dir=true"):
        run_folder.is_finished(job(seed=2))
    assert not run_folder.is_finished(job(seed=2, overwrite_output_dir=True))
    assert load_agent(tmp_path / "agent.yaml") == load_agent("math")
    assert json.loads((tmp_path / "config.json").read_text("utf-8")) == {"use_cache": True, "hidden_size": 8}
    prepared(job(overwrite_output_dir=True))
    assert not run_folder.is_finished(job())


def test_an_interrupted_training_does_not_continue_with_other_settings(job, tmp_path):
    prepared(job())
    assert not run_folder.is_finished(job())
    assert not run_folder.is_finished(job(seed=2))  # nothing was trained, so the folder is not claimed
    checkpoint(tmp_path, 4)
    with pytest.raises(ConfigError, match=r"an interrupted training with other settings \(seed: 1 -> 2\)"):
        run_folder.is_finished(job(seed=2))
    assert not run_folder.is_finished(job(seed=2, overwrite_output_dir=True))


def test_the_loss_of_a_resumed_training_is_that_of_all_its_steps(job, tmp_path):
    """The trainer's own figure omits the losses before its last start, but divides by all steps."""
    prepared(job())
    checkpoint(tmp_path, 4)
    prepared(job())
    steps = [(2, 4.0), (4, 2.0), (5, 1.0)]  # means of 2, 2 and 1 steps
    history = "".join(json.dumps({"current_steps": step, "loss": loss}) + "\n" for step, loss in steps)
    (tmp_path / "trainer_log.jsonl").write_text(f'{history}{{"current_s', encoding="utf-8")
    (tmp_path / "all_results.json").write_text('{"train_loss": 0.2, "epoch": 1.0}', encoding="utf-8")
    run_folder.finish(job(), seconds=1.0)
    assert json.loads((tmp_path / "all_results.json").read_text("utf-8")) == {"train_loss": 2.6, "epoch": 1.0}


def test_the_model_card_has_the_facts_of_the_run(job, tmp_path):
    history = [{"current_steps": step, "loss": loss} for step, loss in ((10, 5.98), (1400, 0.05555))]
    lines = [*map(json.dumps, history), json.dumps({"current_steps": 1400})]
    (tmp_path / "trainer_log.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "README.md").write_text("More information needed")
    options = {"model_name_or_path": str(tmp_path), "dataset": "math", "dataset_dir": "runs/data"}
    run_folder.finish(job(**options, finetuning_type="full"), seconds=1.0)
    card = (tmp_path / "README.md").read_text("utf-8")
    for fact in (
        f"| base model | {tmp_path} |",
        "| trained | full |",
        "| agent | math |",
        "| data | math of runs/data |",
        "| steps | 1,400 |",
        "| loss | 5.98 at step 10, 0.05555 at step 1,400 |",
    ):
        assert fact in card
    assert "More information" not in card
    assert "base_model" not in card  # a folder is no model of the Hub
    (tmp_path / "adapter_config.json").write_text("{}")
    run_folder.finish(job(model_name_or_path="org/name", overwrite_output_dir=True), seconds=1.0)
    card = (tmp_path / "README.md").read_text("utf-8")
    assert yaml.safe_load(card.split("---")[1]) == {"library_name": "peft", "base_model": "org/name"}


def test_a_damaged_mark_is_told(job, tmp_path):
    (tmp_path / "sft_manifest.json").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"sft_manifest.json is damaged; delete it"):
        run_folder.is_finished(job())


def test_tokenised_rows_are_dropped_unless_the_configuration_names_their_folder(job, tmp_path):
    rows = tmp_path / run_folder.TOKENISED_FOLDER
    rows.mkdir()
    for options in ({"tokenized_path": str(rows)}, {}):
        prepared(job(overwrite_output_dir=True, **options))
        run_folder.finish(job(**options), seconds=1.0)
        assert rows.exists() is bool(options)


def test_a_quiet_training_shows_each_new_step_with_its_loss_and_the_time_left(tmp_path, capsys):
    """Steps of an earlier start are not shown again, and the line that the trainer is writing is not read yet."""
    history = tmp_path / "trainer_log.jsonl"
    history.write_text('{"current_steps": 10, "total_steps": 40, "loss": 3.0}\n', encoding="utf-8")
    show = show_steps(history, ProgressView())

    def append(text):
        with history.open("a", encoding="utf-8") as file:
            file.write(text)
        show()
        return capsys.readouterr().out

    assert append('{"current_steps": 20, "total_steps": 40, "lo') == ""
    assert append('ss": 2.0}\n') == "      training steps: 20 of 40, loss 2\n"
    assert append("") == ""
    assert append('{"current_steps": 40, "total_steps": 40, "loss": 0.12345}\n').endswith(
        "40 of 40, loss 0.1235\n"
    )


def test_training_on_a_cpu_keeps_its_memory_unless_told_otherwise(tmp_path, monkeypatch, capsys):
    configs = Path(__file__).parents[2] / "configs"
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)

    def shown(config):
        run_sft(configs / config, [f"output_dir={tmp_path / 'model'}"], dry_run=True)
        return re.findall(r"GLIBC_TUNABLES=\S+", capsys.readouterr().out)

    kept = [f"GLIBC_TUNABLES={KEPT_MEMORY['GLIBC_TUNABLES']}"]
    assert shown("tiny/sft/math.yaml") == kept
    assert shown("sft/web_agent_qwen2.5_7b.yaml") == []
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=0")
    assert shown("tiny/sft/math.yaml") == ["GLIBC_TUNABLES=glibc.malloc.arena_max=0"]
