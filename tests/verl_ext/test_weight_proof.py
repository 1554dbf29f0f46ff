"""A rollout engine that does not have the trainer's weights ends the run, with the step and the tensors."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch
from extras import needs

from afm.agents import load_agent
from afm.datasets import Task
from afm.datasets.rl_files import write_rl
from afm.errors import EngineError
from verl_ext import sync_patches

needs("verl")

from verl_ext.lora import served_name  # noqa: E402
from verl_ext.rollout_cpu import Packed  # noqa: E402
from verl_ext.weight_proof import (  # noqa: E402 - needs verl's extra
    Expected,
    WeightProof,
    WeightsDifferError,
    compare,
    fingerprint,
    signed,
)

ROOT = Path(__file__).resolve().parents[2]
Q = "model.layers.0.self_attn.q_proj.weight"
UP = f"base_model.model.{Q.removesuffix('.weight')}.lora_B.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 2), ()])
def test_a_packed_tensor_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = torch.randn(shape, dtype=torch.float32)
    assert torch.equal(Packed.of(sent, dtype).tensor(), sent.to(dtype))
    turned = sent.mT if shape else sent  # not contiguous
    assert torch.equal(Packed.of(turned, None).tensor(), turned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fingerprint_adds_up_over_the_parts_of_a_tensor(dtype: torch.dtype) -> None:
    whole = torch.randn(30, 8)
    blocks = [(0, 10, 0, 8), (10, 30, 0, 4), (10, 30, 4, 8)]
    parts = [fingerprint(whole[a:b, c:d], dtype, a, c) for a, b, c, d in blocks]
    assert signed(sum(parts)) == fingerprint(whole, dtype)
    bias = torch.randn(7)
    assert signed(fingerprint(bias[:3], dtype) + fingerprint(bias[3:], dtype, 3)) == fingerprint(bias, dtype)


def test_a_fingerprint_is_of_the_values_that_the_engine_serves() -> None:
    trained = torch.randn(4, 6)
    served = trained.to(torch.bfloat16)
    assert fingerprint(trained, torch.bfloat16) == fingerprint(served, torch.bfloat16)
    one_bit = served.clone()
    one_bit.view(torch.int16)[3, 5] ^= 1
    assert fingerprint(one_bit, torch.bfloat16) != fingerprint(served, torch.bfloat16)
    for other in (served.flip(0), served.flip(1), served.roll(1), served.reshape(6, 4)):
        assert fingerprint(other, torch.bfloat16) != fingerprint(served, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("model.norm.weight", ("model.norm.weight", False)),
        (f"base_model.model.{Q.replace('.weight', '.base_layer.weight')}", (Q, False)),
        (UP.replace(".weight", ".default.weight"), (UP, True)),
    ],
)
def test_the_engine_knows_a_parameter_by_the_name_that_verl_sends(
    name: str, served: tuple[str, bool]
) -> None:
    assert served_name(name) == served


def test_the_error_names_the_step_the_engine_and_the_tensors() -> None:
    proof = WeightProof(torch.float32)
    expected = Expected({"a": 1, "b": 2, UP: 3})
    proof.check(expected, [expected.equal, expected.equal], 6)
    with pytest.raises(WeightsDifferError) as caught:
        proof.check(expected, [expected.equal, {"a": 1, "b": 7}], 7)
    assert str(caught.value).startswith(
        f"the weights of step 7 did not reach the rollout engine 2 of 2: of 3 tensors 2 are wrong (b differs; {UP} is not served)."
    )


def test_workers_that_do_not_ask_add_up_the_same_tensors() -> None:
    """Only one worker of an engine gets its fingerprints. After the first sync, all of them read the trained parameters."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[0].requires_grad_(False)
    numbers = []
    for asks in (True, False):
        proof, counts = WeightProof(torch.float32), []
        for step in range(2):
            expected = proof.expect(module)
            reply = AsyncMock(return_value=[expected.equal] if asks else None)
            asyncio.run(compare(proof, expected, SimpleNamespace(served_fingerprints=reply), step))
            counts.append(len(expected.names))
        numbers.append(counts)
    assert numbers == [[4, 2], [4, 2]]


def test_a_matrix_that_holds_an_adapter_changes_with_it() -> None:
    proof = WeightProof(torch.bfloat16, merged=True)
    for adapter, matrix in [(1, 10), (1, 10), (2, 11)]:
        proof.check(Expected({}, {Q: adapter}), [{Q: matrix}], 1)
    with pytest.raises(WeightsDifferError, match=f"step 5 .*{Q} did not change, though its adapter did"):
        proof.check(Expected({}, {Q: 3}), [{Q: 11}], 5)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    from afm.models.tiny import create_tiny_model

    folder = tmp_path_factory.mktemp("proof") / "model"
    create_tiny_model(tokenizer_dir, folder, seed=0, hidden_size=32, layers=1)
    return folder


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    """Data type of the engine. The trainer's is float32."""
    return str(request.param)


@pytest.fixture
def server(model_dir: Path, tokenizer: Any, dtype: str) -> Any:
    from verl_ext.rollout_cpu import CpuServer

    sizes = {"response_length": 8, "prompt_length": 8, "max_num_seqs": 2}
    rollout = SimpleNamespace(engine_kwargs={"afm_cpu": {"dtype": dtype}}, ignore_eos=False, seed=0, **sizes)
    return CpuServer(rollout, SimpleNamespace(local_path=str(model_dir), tokenizer=tokenizer))


@pytest.fixture
def trainer(model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


MOVES = {"float32": 1e-3, "bfloat16": 1e-2}
"""Standard deviation of a step. In bfloat16, a smaller one would not change the weight 1 of a norm."""


def moved(module: Any, dtype: str) -> dict[str, torch.Tensor]:
    """Return the trained parameters after a step, as verl sends them."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=MOVES[dtype])
    trained = {
        served_name(name)[0]: value for name, value in module.named_parameters() if value.requires_grad
    }
    return {name: value.detach().clone() for name, value in trained.items()}


def packed(tensors: dict[str, torch.Tensor]) -> dict[str, Packed]:
    """The tensors as they arrive from Ray: in memory that cannot be written to."""
    bucket = {name: Packed.of(tensor, None) for name, tensor in tensors.items()}
    for one in bucket.values():
        one.data.flags.writeable = False
    return bucket


@pytest.mark.parametrize("fault", ["none", "the sync", "a tensor", "another tensor's values"])
def test_a_sync_that_loses_weights_is_noticed(server: Any, trainer: Any, fault: str, dtype: str) -> None:
    proof = WeightProof(getattr(torch, dtype))
    sent = moved(trainer, dtype)
    one, other = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    match fault:
        case "the sync":
            sent = {}
        case "a tensor":
            del sent[one]
        case "another tensor's values":
            sent[one] = sent[other]

    async def sync() -> None:
        expected = proof.expect(trainer)
        await server.update_weights(packed(sent), True, 3)
        proof.check(expected, [await server.fingerprints(expected.names)], 3)

    if fault == "none":
        asyncio.run(sync())
        return
    wrong = (
        r"of 14 tensors 14 are wrong"
        if fault == "the sync"
        else rf"of 14 tensors 1 are wrong \({one} differs\)"
    )
    with pytest.raises(WeightsDifferError, match=f"weights of step 3 .*{wrong}"):
        asyncio.run(sync())


@pytest.mark.parametrize("fault", ["none", "not sent", "not merged"])
def test_an_adapter_that_is_not_delivered_is_noticed(
    server: Any, trainer: Any, fault: str, dtype: str
) -> None:
    """The engine merges the adapter into its matrices, and its log-probabilities equal those of peft's model."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(trainer, LoraConfig(r=2, lora_alpha=6, target_modules="all-linear"))
    config = {"r": 2, "lora_alpha": 6}
    proof = WeightProof(getattr(torch, dtype))
    text = torch.tensor([[5, 6, 7, 8]])

    async def sync(step: int, *, broken: bool) -> None:
        adapter = moved(adapted, dtype)
        expected = proof.expect(adapted)
        if not broken:
            await server.update_weights(packed(adapter), True, step, config)
        elif fault == "not merged":
            server._adapter.replace(adapter, config)
        proof.check(expected, [await server.fingerprints(expected.names)], step)

    async def run() -> None:
        await sync(0, broken=False)
        await sync(1, broken=fault != "none")
        await sync(2, broken=False)
        logits = await server._engine.read_weights(lambda _: server._engine._model(text).logits)
        assert torch.allclose(logits.float(), adapted(text).logits, atol=1e-5 if dtype == "float32" else 3e-2)

    if fault == "none":
        asyncio.run(run())
        return
    with pytest.raises(
        WeightsDifferError, match=r"weights of step 1 .*of 14 tensors \d+ are wrong .*lora_[AB]"
    ):
        asyncio.run(run())


def test_an_adapter_of_another_kind_is_refused(server: Any) -> None:
    with pytest.raises(EngineError, match="a matrix that the model does not have"):
        asyncio.run(
            server.update_weights(
                packed({UP.replace("_B", "_A").replace("q_", "x_"): torch.ones(1)}), True, 0, {"r": 1}
            )
        )


@pytest.mark.slow
def test_a_run_that_loses_an_adapter_ends_at_that_step(
    tmp_path: Path, model_dir: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses LoRA with a real trainer and engine. ``lost_sync`` keeps trained adapters from leaving the trainer."""
    from verl_ext.launcher import run_rl

    agent = load_agent(str(ROOT / "configs/tiny/agents/math.yaml"))
    tasks = (
        Task(id=f"q{n}", question=f"{n}+1?", data_source="mini_math", ground_truth=str(n)) for n in range(16)
    )
    write_rl(tasks, agent, tmp_path / "rl.parquet")
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "lost_sync")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests/shared'}:{os.environ.get('PYTHONPATH', '')}")
    sizes = ("ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu")
    overrides = {
        "model": model_dir,
        "train_files": tmp_path / "rl.parquet",
        "output_dir": tmp_path / "run",
        "rewards": "{formula: overlong, overlong: {max_tokens: 96, buffer_tokens: 96}}",
        "limits": "{max_response_tokens: 96}",
        "verl.data.train_batch_size": 2,
        "verl.algorithm.filter_groups.enable": "false",
        "verl.actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        f"verl.actor_rollout_ref.actor.{sizes[0]}": 8,
        f"verl.actor_rollout_ref.rollout.{sizes[1]}": 8,
        "verl.trainer.total_training_steps": 3,
    }
    words = [f"{key}={value}" for key, value in overrides.items()]
    assert run_rl(str(ROOT / "configs/tiny/rl/math_lora.yaml"), words) == 1
    output = capfd.readouterr()
    assert "step 1/3" not in output.out
    assert re.search(
        r"the weights of step 1 did not reach the rollout engine: of 14 tensors \d+ are wrong "
        r"\(base_model\.model\.model\.layers\.0\.\S+\.lora_[AB]\.weight differs;",
        output.err,
    )


def test_a_step_that_begins_without_a_sync_ends_the_run() -> None:
    class Trainer:
        config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout={}))
        checkpoint_manager = SimpleNamespace(afm_synced=4)
        global_steps = 5

        def on_step_begin(self) -> None: ...

    sync_patches.miss_no_sync.apply(SimpleNamespace(PPOTrainer=Trainer, __name__="verl"))  # type: ignore[arg-type]
    trainer = Trainer()
    trainer.on_step_begin()
    trainer.global_steps = 6
    with pytest.raises(EngineError, match="step 6 begins, but the rollout engine has the weights of step 4"):
        trainer.on_step_begin()
    trainer.config.actor_rollout_ref.rollout["custom"] = {"weight_proof": False}
    trainer.on_step_begin()
