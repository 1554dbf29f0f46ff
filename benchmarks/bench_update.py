"""Compare ways to compute an update of a pre-trained model on a CPU: attention, memory, order of rows, precision.

    .venv/bin/python benchmarks/bench_update.py models/smollm2_135m --rounds 3 --out update.json

An update is forward and backward of 64 rows of random tokens in micro batches of 8, padded to the longest row of each, and a
step of AdamW. Every way runs in a process of its own, because glibc reads its settings at the start. The process times one
update after a warm-up, and the ways take turns. ``base`` combines all choices that we found faster on a CPU with bfloat16
instructions. Each other way changes one of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from timing import environment, report

from afm.processes import KEPT_MEMORY

BASE = {"dtype": "bfloat16", "attention": "eager", "order": "sorted", "memory": "kept"}
WAYS = {
    "base": {},
    "sdpa": {"attention": "sdpa"},
    "random order": {"order": "random"},
    "returned memory": {"memory": "returned"},
    "float32": {"dtype": "float32"},
}
ROWS, MICRO = 64, 8


def update_once(
    model_dir: str, way: dict[str, str], lengths: tuple[int, int], threads: int
) -> dict[str, float]:
    """Compute a warm-up and an update, and return the seconds and padded tokens of the update."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation=way["attention"]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    draw = random.Random(0)
    rows = [draw.randint(*lengths) for _ in range(ROWS)]
    if way["order"] == "sorted":
        rows.sort()
    for row_lengths in (rows[-MICRO:], rows):
        begun, tokens = time.perf_counter(), 0
        for start in range(0, len(row_lengths), MICRO):
            part = torch.tensor(row_lengths[start : start + MICRO])
            mask = torch.arange(int(part.max())) < part[:, None]
            ids = torch.randint(model.config.vocab_size, mask.shape)
            with torch.autocast("cpu", torch.bfloat16, enabled=way["dtype"] == "bfloat16"):
                model(ids, attention_mask=mask.long(), labels=ids.masked_fill(~mask, -100)).loss.backward()
            tokens += ids.numel()
        optimizer.step()
        optimizer.zero_grad()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": time.perf_counter() - begun, "tokens": tokens, "peak_gib": peak}


def main() -> None:
    """Let all ways take turns, and print medians and ratios to ``base``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a causal language model")
    parser.add_argument("--lengths", type=int, nargs=2, default=(130, 200), help="tokens of a row")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        way = BASE | WAYS[options.child]
        print(json.dumps(update_once(options.model, way, tuple(options.lengths), options.threads)))
        return
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in options.ways}
    for _ in range(options.rounds):
        for name in options.ways:
            kept = (BASE | WAYS[name])["memory"] == "kept"
            variables = {key: value for key, value in os.environ.items() if key not in KEPT_MEMORY}
            child = [sys.executable, *sys.argv, f"--child={name}"]
            result = subprocess.run(
                child, env=variables | (KEPT_MEMORY if kept else {}), check=True, stdout=subprocess.PIPE
            )
            seen[name].append(json.loads(result.stdout.splitlines()[-1]))
    base = seen[options.ways[0]]
    ways = {
        name: {
            **{key: round(statistics.median(each[key] for each in runs), 2) for key in runs[0]},
            "ratio": round(
                statistics.median(x["seconds"] / y["seconds"] for x, y in zip(runs, base, strict=True)), 2
            ),
        }
        for name, runs in seen.items()
    }
    settings = {
        "rows": ROWS,
        "lengths": options.lengths,
        "threads": options.threads,
        "rounds": options.rounds,
    }
    report({**settings, "ways": ways, "environment": environment(["torch", "transformers"])}, options.out)


if __name__ == "__main__":
    main()
