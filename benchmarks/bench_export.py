"""Measure the memory of `afm export` at the size of Qwen2.5-7B: merge and check the parts of eight FSDP2 workers.

    benchmarks/bench_export.py --folder DIR [--dtype float32] [--workers 8]

Needs 35 GB of disk below DIR for float32, or 18 GB for bfloat16, and removes its files. The parts are sparse files with
zeros, except for a number in each 1,024th row that identifies every part of every tensor in the exported model. There is no
rival. A program that loads the whole model before it writes needs the size of the weights, which is reported too.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from timing import environment, report

from afm.agents import load_agent
from verl_ext.checkpoints import SHARDS_FILE, shard_file
from verl_ext.export import export_model

LAYERS, HIDDEN, MLP, KEYS, VOCABULARY = 28, 3584, 18944, 512, 152064
STEP = 1
EACH = 1024
"""Distance between marked rows in each part."""
_PUNCH = 0x01 | 0x02
"""``FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE``."""
_BLOCK = 1 << 20


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of Qwen2.5-7B's weights: 7,615,616,512 numbers."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        begin = f"model.layers.{layer}"
        for name, rows in (("q", HIDDEN), ("k", KEYS), ("v", KEYS)):
            yield f"{begin}.self_attn.{name}_proj.weight", (rows, HIDDEN)
            yield f"{begin}.self_attn.{name}_proj.bias", (rows,)
        yield f"{begin}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{begin}.mlp.gate_proj.weight", (MLP, HIDDEN)
        yield f"{begin}.mlp.up_proj.weight", (MLP, HIDDEN)
        yield f"{begin}.mlp.down_proj.weight", (HIDDEN, MLP)
        yield f"{begin}.input_layernorm.weight", (HIDDEN,)
        yield f"{begin}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def mark(number: int, row: int) -> int:
    """Return the first value in a row of the tensor with this number; bfloat16 represents it exactly."""
    return 1 + (7 * number + row) % 120


def bounds(rows: int, rank: int, workers: int) -> tuple[int, int]:
    """Return the rows of a worker under FSDP2."""
    length = -(-rows // workers)
    return min(rank * length, rows), min((rank + 1) * length, rows)


def write_part(folder: Path, rank: int, workers: int, dtype: torch.dtype) -> None:
    """Store one worker's part as verl does, and free the blocks of zeros."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=workers)
    mesh = init_device_mesh("cpu", (workers,))
    part: dict[str, Any] = {}
    for number, (name, size) in enumerate(shapes()):
        begin, end = bounds(size[0], rank, workers)
        local = torch.zeros(end - begin, *size[1:], dtype=dtype)
        rows = torch.tensor([mark(number, row) for row in range(begin, end, EACH)], dtype=dtype)
        local.view(end - begin, -1)[::EACH, 0] = rows
        stride = (size[1], 1) if len(size) == 2 else (1,)
        part[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(size), stride=stride
        )
    file = shard_file(folder, "model", workers, rank)
    torch.save(part, file)
    dig_holes(file)


def dig_holes(file: Path) -> None:
    """Free the blocks of a file that contain only zeros."""
    libc = ctypes.CDLL(None, use_errno=True)
    zeros = bytes(_BLOCK)
    with file.open("r+b") as stream:
        os.fsync(stream.fileno())
        offset = 0
        while block := stream.read(_BLOCK):
            if block == zeros:
                libc.fallocate(stream.fileno(), _PUNCH, ctypes.c_long(offset), ctypes.c_long(_BLOCK))
            offset += len(block)


def make_checkpoint(checkpoints: Path, workers: int, dtype: str) -> None:
    """Write a checkpoint of step 1, each part in a separate process."""
    actor = checkpoints / f"global_step_{STEP}" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    config = {"model_type": "qwen2", "dtype": "bfloat16", "tie_word_embeddings": False}
    (actor / "huggingface" / "config.json").write_text(json.dumps(config))
    (actor / SHARDS_FILE).write_text(json.dumps({"FSDP_version": 2, "world_size": workers}))
    for rank in range(workers):
        words = [sys.executable, __file__, "--folder", str(actor), "--dtype", dtype]
        subprocess.run([*words, "--workers", str(workers), "--part", str(rank)], check=True)
        print(f"part {rank + 1} of {workers} written", file=sys.stderr, flush=True)


def export(checkpoints: Path, out: Path) -> dict[str, float]:
    """Export in this process, so that its peak memory is that of the export."""
    begun = time.perf_counter()
    export_model(checkpoints, STEP, out, load_agent("math"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    return {"seconds": round(time.perf_counter() - begun, 1), "peak_gib": round(peak, 2)}


def wrong_rows(out: Path, workers: int) -> int:
    """Count marked rows with a wrong first value, and tensors that are absent or have another size."""
    from safetensors import safe_open

    index = json.loads((out / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    wrong = abs(len(index) - len(list(shapes())))
    for number, (name, size) in enumerate(shapes()):
        with safe_open(out / index[name], "pt") as file:
            tensor = file.get_slice(name)
            wrong += tuple(tensor.get_shape()) != size
            for rank in range(workers):
                begin, end = bounds(size[0], rank, workers)
                for row in range(begin, end, EACH):
                    wrong += float(tensor[row : row + 1].reshape(-1)[0]) != mark(number, row)
    return wrong


def main() -> int:
    """Make the checkpoint, export it in a separate process, check it, and remove both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--export", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part is not None:
        write_part(given.folder, given.part, given.workers, getattr(torch, given.dtype))
        return 0
    place = given.folder / "bench_export"
    if given.export:
        print(json.dumps(export(place / "checkpoints", place / "model")))
        return 0
    place.mkdir(parents=True)
    try:
        make_checkpoint(place / "checkpoints", given.workers, given.dtype)
        words = [sys.executable, __file__, "--folder", str(given.folder), "--export"]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        files = sorted((place / "model").glob("*.safetensors"))
        result = {
            "dtype": given.dtype,
            "workers": given.workers,
            **json.loads(done.stdout.splitlines()[-1]),
            "weights_gib": round(sum(file.stat().st_size for file in files) / 1024**3, 2),
            "files": len(files),
            "wrong_rows": wrong_rows(place / "model", given.workers),
            "environment": environment(["torch", "huggingface-hub", "safetensors"]),
        }
    finally:
        shutil.rmtree(place)
    report(result, given.out)
    return 1 if result["wrong_rows"] else 0


if __name__ == "__main__":
    sys.exit(main())
