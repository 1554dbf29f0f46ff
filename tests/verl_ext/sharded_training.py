"""Trains a small model with FSDP2 and saves it with verl's checkpoint manager: ``sharded_training.py FOLDER``.

One, two and three workers run, each from the checkpoint of another run. ``FOLDER/NAME.pt`` holds the state of a run after
loading (``loaded``) and after two more steps (``trained``), merged on its first worker.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl.utils.checkpoint.fsdp_checkpoint_manager as engine
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_ext.patches import load_any_world_size

RUNS = (("one", 1, None), ("two", 2, "one"), ("three", 3, "two"), ("one again", 1, "three"))
"""Name, workers, whose checkpoint it goes on from."""


def make(workers: int) -> tuple[Any, torch.optim.Optimizer, Any]:
    # Nothing divides by 2 and 3: rows of the embedding are shared out unevenly, and a bias of 2 leaves a worker without any.
    shape: dict[str, Any] = {
        "hidden_size": 20,
        "intermediate_size": 34,
        "num_hidden_layers": 2,
        "vocab_size": 101,
    }
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(**shape, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    )
    mesh = init_device_mesh("cpu", (workers,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def train(model: Any, optimizer: torch.optim.Optimizer, schedule: Any, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(0, 101, (4, 12), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def together(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: together(item) for key, item in value.items()}
    return [together(item) for item in value] if isinstance(value, list) else value


def run(rank: int, workers: int, folder: Path, name: str, source: str | None) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / name}.rendezvous", rank=rank, world_size=workers
    )
    load_any_world_size.apply(engine)
    model, optimizer, schedule = make(workers)
    torch.manual_seed(100 + rank)
    contents = ["model", "optimizer", "extra"]
    config: Any = {"load_contents": contents, "save_contents": contents}
    manager = engine.FSDPCheckpointManager(model, optimizer, schedule, checkpoint_config=config)
    if source is None:
        train(model, optimizer, schedule, range(3))
    else:
        manager.load_checkpoint(str(folder / source))
    state = {
        "model": together(model.state_dict()),
        "optimizer": together(optimizer.state_dict()),
        "schedule": schedule.state_dict(),
        "random": torch.get_rng_state(),
    }
    manager.save_checkpoint(str(folder / name))
    train(model, optimizer, schedule, range(3, 5))
    trained = together(model.state_dict())
    if rank == 0:
        torch.save({"loaded": state, "trained": trained}, folder / f"{name}.pt")
    dist.destroy_process_group()


def main(folder: Path) -> None:
    start = multiprocessing.get_context("fork")
    for name, workers, source in RUNS:
        group = [
            start.Process(target=run, args=(rank, workers, folder, name, source)) for rank in range(workers)
        ]
        for process in group:
            process.start()
        for process in group:
            process.join()
        if any(process.exitcode for process in group):
            raise SystemExit(f"{name}: {[process.exitcode for process in group]}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
