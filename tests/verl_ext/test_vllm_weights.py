"""vLLM's weights have the trainer's fingerprints: fused and split matrices, padded embeddings, adapters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from extras import needs

needs("verl")

from verl_ext import sync_patches  # noqa: E402 - needs verl's extra
from verl_ext.sync_patches import _adapter_of_layer, _weights, fingerprints_of_worker  # noqa: E402 - needs verl's extra
from verl_ext.weight_proof import WeightProof, fingerprint, signed  # noqa: E402


class VocabParallelEmbedding(torch.nn.Module): ...


class ColumnParallelLinear(torch.nn.Module): ...


class MergedColumnParallelLinear(ColumnParallelLinear): ...


class QKVParallelLinear(ColumnParallelLinear): ...


class RowParallelLinear(torch.nn.Module): ...


def layer(kind: type[torch.nn.Module], rank: int, weight: torch.Tensor, **facts: Any) -> torch.nn.Module:
    module = kind()
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    for name, value in ({"tp_rank": rank} | facts).items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_processes_of_an_engine_add_up_to_the_trainers_tensors(processes: int) -> None:
    """With four heads and two key-value heads of size 2, four processes hold each key-value head twice."""
    sizes = {
        "q": (8, 6),
        "k": (4, 6),
        "v": (4, 6),
        "gate": (12, 6),
        "up": (12, 6),
        "down": (6, 12),
        "embed": (10, 6),
    }
    whole = {name: torch.randn(size) for name, size in sizes.items()}
    total: dict[str, int] = {}
    for rank in range(processes):
        copies = max(1, processes // 2)
        kv_heads = max(1, 2 // processes)

        def rows(name: str, count: int = processes, at: int = rank) -> torch.Tensor:
            return whole[name].chunk(count)[at]

        kv = [rows(name, processes // copies, rank // copies) for name in "kv"]
        heads = {
            "num_heads": 4 // processes,
            "num_kv_heads": kv_heads,
            "num_kv_head_replicas": copies,
            "head_size": 2,
        }
        part = -(-10 // processes)
        held = whole["embed"][rank * part : (rank + 1) * part]
        padded = torch.cat([held, torch.zeros(part + 3 - len(held), 6)])
        shard = SimpleNamespace(num_org_elements=len(held), org_vocab_start_index=rank * part)
        model = torch.nn.ModuleDict(
            {
                "embed": layer(VocabParallelEmbedding, rank, padded, shard_indices=shard),
                "qkv": layer(QKVParallelLinear, rank, torch.cat([rows("q"), *kv]), **heads),
                "gate_up": layer(
                    MergedColumnParallelLinear,
                    rank,
                    torch.cat([rows("gate"), rows("up")]),
                    output_partition_sizes=[12 // processes] * 2,
                ),
                "down": layer(RowParallelLinear, rank, whole["down"].chunk(processes, 1)[rank]),
            }
        )
        model.packed_modules_mapping = {"qkv": ["q", "k", "v"], "gate_up": ["gate", "up"]}
        for name, block, row, column in _weights(model):
            total[name] = signed(total.get(name, 0) + fingerprint(block, torch.float32, row, column))
    named = {name.removeprefix("."): value for name, value in total.items()}
    assert named == {f"{name}.weight": fingerprint(value, torch.float32) for name, value in whole.items()}


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_what_each_process_of_a_layer_holds_whole_counts_once(processes: int) -> None:
    """A layer that is split by columns has its bias, and the second part of its adapter, in every process."""
    down, up, bias = torch.randn(2, 8), torch.randn(6, 2), torch.randn(6)
    total: dict[str, int] = {}
    for rank, part in enumerate(down.chunk(processes, 1)):
        base = layer(RowParallelLinear, rank, torch.zeros(6, 8 // processes))
        base.bias = torch.nn.Parameter(bias)
        adapted = SimpleNamespace(
            base_layer=base, lora_a_stacked=(part[None, None],), lora_b_stacked=(up[None, None],)
        )
        blocks = [
            *_adapter_of_layer(adapted, "layer", object(), slot=0, rank=2),
            *_weights(torch.nn.ModuleDict({"layer": base})),
        ]
        for name, block, row, column in blocks:
            total[name] = signed(total.get(name, 0) + fingerprint(block, torch.float32, row, column))
    names = {"base_model.model.layer.lora_A.weight": down, "base_model.model.layer.lora_B.weight": up}
    names |= {"layer.bias": bias, "layer.weight": torch.zeros(6, 8)}
    assert {name.replace("model..", "model.").removeprefix("."): value for name, value in total.items()} == {
        name: fingerprint(tensor, torch.float32) for name, tensor in names.items()
    }


@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_engine_has_what_the_trainer_has(
    tmp_path: Path, tokenizer_dir: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM on a CPU: its own weights, then an adapter whose scale is no power of two, then the adapter removed."""
    needs("vllm")
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }.items():
        monkeypatch.setenv(name, value)
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    sync_patches.keep_linear_weights.install()
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    from afm.models.tiny import create_tiny_model

    create_tiny_model(tokenizer_dir, tmp_path / "model", seed=0, hidden_size=128, layers=1)
    options: dict[str, Any] = {
        "enforce_eager": True,
        "max_model_len": 64,
        "enable_lora": True,
        "max_lora_rank": 16,
    }
    engine = LLM(str(tmp_path / "model"), dtype=str(dtype).removeprefix("torch."), **options)
    worker = engine.llm_engine.model_executor.driver_worker.worker
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    expected = WeightProof(dtype).expect(model)
    assert fingerprints_of_worker(worker, expected.names) == expected.equal

    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=12, target_modules="all-linear"))
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = WeightProof(dtype, up_scale=12 / 8).expect(adapted)
    worker.add_lora(LoRARequest("adapter", 123, str(tmp_path / "adapter")))
    assert fingerprints_of_worker(worker, expected.names) == expected.equal
    worker.remove_lora(123)
    held = fingerprints_of_worker(worker, expected.names)
    assert {name for name in expected.names if ".lora_" in name} == set(expected.names) - set(held)
