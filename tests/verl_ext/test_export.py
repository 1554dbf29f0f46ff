"""A checkpoint of any step becomes a model folder that every command accepts."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from afm.agents import agent_of_model, load_agent, save_agent
from afm.errors import ConfigError, EngineError, UsageError
from afm.models.base import Generation, SamplingParams
from verl_ext.checkpoints import exported_step
from verl_ext.export import export, export_model

torch = pytest.importorskip("torch")
from afm.models.load import TransformersModel  # noqa: E402
from afm.models.tiny import create_tiny_model  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "model"
    create_tiny_model(tokenizer_dir, folder, seed=3, hidden_size=32, layers=1)
    return folder


def save(model: Path, checkpoints: Path, step: int, *, parts: bool = False, whole: bool = True) -> Path:
    """Save as verl does: the exported model, or one worker's part of the weights, and ``data.pt`` last."""
    from transformers import AutoModelForCausalLM

    actor = checkpoints / f"global_step_{step}" / "actor"
    shutil.copytree(model, actor / "huggingface")
    config = actor / "huggingface" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    if parts:
        weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
        torch.save(weights, actor / "model_world_size_1_rank_0.pt")
        (actor / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
        (actor / "huggingface" / "model.safetensors").unlink()
    if whole:
        with zipfile.ZipFile(actor.parent / "data.pt", "w") as archive:
            archive.writestr("data.pkl", "state")
    return actor


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Path:
    """A run that was killed during the save of step 6."""
    save_agent(load_agent("math").model_copy(update={"prompt": "short"}), tmp_path / "agent.yaml")
    for step in (2, 4):
        save(model, tmp_path / "checkpoints", step, parts=step == 2)
    save(model, tmp_path / "checkpoints", 6, whole=False)
    return tmp_path


def said(folder: Path) -> Generation:
    async def ask() -> Generation:
        engine = TransformersModel(folder, device="cpu")
        try:
            prompt = engine.encode_prompt([{"role": "user", "content": "12+13?"}])
            return await engine.generate(prompt, SamplingParams(max_new_tokens=12, temperature=1.0, seed=1))
        finally:
            await engine.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("step", [2, 4], ids=["from a worker's part", "from the exported model"])
def test_the_exported_model_says_what_the_trained_one_does_with_the_same_probabilities(
    run: Path, model: Path, step: int
) -> None:
    out = export(run, step)
    assert out == run / f"model_step_{step}"
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert agent_of_model(out, "math").prompt == "short"
    assert exported_step(out) == step
    found, expected = said(out), said(model)
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs


def test_the_newest_whole_checkpoint_is_taken_and_nothing_is_overwritten(run: Path) -> None:
    assert export(run) == run / "model_step_4"
    with pytest.raises(ConfigError, match=r"model_step_4: already exists"):
        export(run)
    (run / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty: already exists"):
        export(run, out=run / "empty")
    assert export(run, out=run / "new" / "again") == run / "new" / "again"
    assert not list(run.glob("*.new"))


@pytest.mark.parametrize("step", [1, 6])
def test_a_step_without_a_whole_checkpoint_is_answered_with_those_that_exist(run: Path, step: int) -> None:
    with pytest.raises(ConfigError, match=rf"no complete checkpoint of step {step}; complete ones: 2, 4$"):
        export(run, step)


def test_folders_of_checkpoints_and_one_of_them_are_taken_too(run: Path) -> None:
    assert export(run / "checkpoints") == run / "model_step_4"
    assert export(run / "checkpoints" / "global_step_2") == run / "model_step_2"
    with pytest.raises(UsageError, match="is step 2, but --step is 4"):
        export(run / "checkpoints" / "global_step_2", 4)
    with pytest.raises(ConfigError, match=r"contains no checkpoint \(global_step_N\)"):
        export(run / "model_step_2")


@pytest.mark.parametrize("alone", [False, True], ids=["with the frozen weights", "adapters alone"])
def test_a_run_of_lora_becomes_a_model_or_an_adapter(tmp_path: Path, model: Path, alone: bool) -> None:
    """Both give the same tokens as the trained model, with the same probabilities."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    run, actor = tmp_path, save(model, tmp_path / "checkpoints", 2, parts=True)
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(trained, LoraConfig(r=2, lora_alpha=6, target_modules="all-linear"))
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.1)
    weights = {name: value for name, value in adapted.state_dict().items() if "lora_" in name or not alone}
    torch.save(weights, actor / "model_world_size_1_rank_0.pt")
    (actor / "lora_train_meta.json").write_text('{"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM"}')
    (run / "rl_config.yaml").write_text(f"model: {model}\n")
    save_agent(load_agent("math"), run / "agent.yaml")

    merged = export(run, None, run / "merged")
    adapter = export(run, None, run / "adapter", adapter=True)
    assert (adapter / "adapter_model.safetensors").stat().st_size < (
        merged / "model.safetensors"
    ).stat().st_size
    adapted.merge_and_unload().save_pretrained(tmp_path / "expected")
    shutil.copytree(
        model, tmp_path / "expected", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors")
    )
    answers = [said(folder) for folder in (tmp_path / "expected", merged, adapter)]
    assert [answer.token_ids for answer in answers[1:]] == [answers[0].token_ids] * 2
    for answer in answers[1:]:
        assert answer.logprobs == pytest.approx(answers[0].logprobs, abs=1e-5)
    assert said(model).logprobs != pytest.approx(answers[0].logprobs, abs=1e-5)


def test_adapters_without_their_model_are_told(tmp_path: Path, model: Path) -> None:
    actor = save(model, tmp_path / "checkpoints", 2, parts=True)
    part = {f"base_model.model.x.lora_{side}.default.weight": torch.ones(1, 1) for side in "AB"}
    torch.save(part, actor / "model_world_size_1_rank_0.pt")
    (actor / "lora_train_meta.json").write_text('{"r": 1, "lora_alpha": 1}')
    save_agent(load_agent("math"), tmp_path / "agent.yaml")
    with pytest.raises(
        EngineError, match="holds only an adapter, and the unknown folder of its model has no"
    ):
        export(tmp_path)
    (tmp_path / "rl_config.yaml").write_text("model: somebody/else\n")
    with pytest.raises(EngineError, match="somebody/else has no"):
        export(tmp_path)


def test_checkpoints_of_stock_verl_need_the_name_of_their_agent(tmp_path: Path, model: Path) -> None:
    save(model, tmp_path, 5)
    with pytest.raises(
        ConfigError, match=r"no agent\.yaml, so the trained agent is unknown; name it \(--agent"
    ):
        export(tmp_path)
    out = export(tmp_path, agent="math")
    assert out == tmp_path / "model_step_5"
    assert agent_of_model(out, "math") == load_agent("math")


def test_a_later_export_replaces_the_earlier_one_whole(run: Path) -> None:
    out = run / "model"
    for step in (2, 4):
        export_model(run / "checkpoints", step, out, load_agent("math"))
        assert (exported_step(out), (out / "left_over").exists()) == (step, False)
        (out / "left_over").touch()


def test_weights_that_are_cut_off_are_refused_and_leave_nothing(run: Path) -> None:
    file = run / "checkpoints/global_step_4/actor/huggingface/model.safetensors"
    later = file.with_name("second.safetensors")
    later.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(EngineError, match=r"second\.safetensors of the checkpoint is truncated"):
        export(run)
    later.rename(file)
    with pytest.raises(EngineError, match=r"model\.safetensors of the checkpoint is truncated"):
        export(run)
    assert not list(run.glob("model_step_4*"))


def test_a_part_that_the_index_names_has_to_be_there(run: Path) -> None:
    folder = run / "checkpoints/global_step_4/actor/huggingface"
    index = {"weight_map": {"w": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(EngineError, match=r"model-00002-of-00002\.safetensors is not in the checkpoint"):
        export(run)


def test_a_checkpoint_that_the_run_removes_meanwhile_is_told(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/global_step_4/actor")
    with pytest.raises(
        EngineError, match=r"no model weights: expected the shards of all workers .* or add model to"
    ):
        export_model(run / "checkpoints", 4, run / "model", load_agent("math"))
    assert export(run) == run / "model_step_2"


@pytest.mark.slow
def test_the_command_prints_the_folder_or_one_line(run: Path) -> None:
    words = [sys.executable, "-m", "afm.cli.main", "export", str(run)]
    done = subprocess.run([*words, "--step", "4"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{run / 'model_step_4'}\n"), done.stderr
    failed = subprocess.run([*words, "--step", "5"], capture_output=True, text=True)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("error: ")
    assert failed.stderr.endswith("complete ones: 2, 4\n")
