"""Compare our CPU engine with plain ``transformers`` on the same model and prompts.

    .venv/bin/python benchmarks/bench_engine.py --out engine.json

First checks in float32 that both write the same greedy tokens. Then both sample: batches of 1, 8 and 32 rows of equal length, which is
the best case for ``generate``, and 32 rows of different lengths. "groups" are 64 samples of 8 questions to one agent that
arrive one after another, with and without the states of known prompts. There are two models, one of the quickstart's size and a
larger one, or that of `--model`. Our engine also returns the log-probability of each token; ``generate`` does not. The target is to be at least
as fast.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from timing import environment, report, summary

from afm.models.base import Generation, SamplingParams
from afm.models.engine import BatchEngine
from afm.models.tiny import create_tiny_model, train_tokenizer

PROMPT_TOKENS = 64
SIZES: dict[str, dict[str, int]] = {
    "quickstart": {},
    "larger": {"hidden_size": 512, "layers": 8, "mlp": 1536},
}


class Engines:
    """Our engine and plain transformers with the same model."""

    def __init__(self, model_dir: Path, threads: int, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self.model.generation_config.eos_token_id = None  # every row gets the requested length
        self._plain = copy.deepcopy(self.model)  # our engine sets its own attention for its model
        self.vocabulary = self.model.config.vocab_size
        self._threads = threads

    def ours(
        self,
        prompts: Sequence[Sequence[int]],
        lengths: Sequence[int],
        *,
        greedy: bool = False,
        prefix_tokens: int = 16_384,
        apart_s: float = 0.0,
    ) -> list[list[int]]:
        """Return the tokens of our engine, with the requested length for each prompt; no token ends a text.

        Args:
            apart_s: Seconds between the arrivals of two requests.
        """

        async def generate() -> list[list[int]]:
            engine = BatchEngine(
                self.model,
                eos_ids=(),
                pad_id=0,
                decode=str,
                vocabulary_size=self.vocabulary,
                threads=self._threads,
                seed=0,
                prefix_tokens=prefix_tokens,
            )

            async def ask(number: int) -> Generation:
                await asyncio.sleep(number * apart_s)
                temperature = 0.0 if greedy else 1.0
                return await engine.generate(prompts[number], SamplingParams(lengths[number], temperature))

            found = await asyncio.gather(*map(ask, range(len(prompts))))
            await engine.close()
            return [list(generation.token_ids) for generation in found]

        return asyncio.run(generate())

    def plain(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], *, greedy: bool = False
    ) -> list[list[int]]:
        """Return the tokens of ``generate``, which runs until the longest row is done."""
        import torch

        ids_BT = torch.tensor(prompts)
        found_BT = self._plain.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            max_new_tokens=max(lengths),
            do_sample=not greedy,
            top_k=0,
            top_p=1.0,
            temperature=None if greedy else 1.0,
            pad_token_id=0,
        )[:, ids_BT.shape[1] :]
        return [row[:length] for row, length in zip(found_BT.tolist(), lengths, strict=True)]


def race(model_dir: Path, threads: int, tokens: int, runs: int, dtype: str = "float32") -> dict[str, Any]:
    """Return the seconds of both engines by batch.

    Raises:
        SystemExit: The engines write different greedy tokens.
    """
    engines = Engines(model_dir, threads, dtype)
    draw = random.Random(0)
    prompts = [[draw.randrange(3, engines.vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(32)]
    even, uneven = [tokens] * 32, [max(1, tokens * (row + 1) // 32) for row in range(32)]
    greedy = [way(prompts[:8], even[:8], greedy=True) for way in (engines.ours, engines.plain)]
    if dtype == "float32" and greedy[0] != greedy[1]:
        raise SystemExit("the engines write different greedy tokens")
    found: dict[str, Any] = {}
    for name, count, lengths in (("1", 1, even), ("8", 8, even), ("32", 32, even), ("32 uneven", 32, uneven)):
        ways: dict[str, Callable[[], object]] = {
            way: lambda way=way, count=count, lengths=lengths: getattr(engines, way)(  # type: ignore[misc]
                prompts[:count], lengths[:count]
            )
            for way in ("ours", "plain")
        }
        pairs = paired(ways, runs)
        sampled = sum(lengths[:count])
        found[name] = {
            "seconds": {way: summary(values) for way, values in pairs.items()},
            "tokens_per_s": {
                way: round(sampled / statistics.median(values)) for way, values in pairs.items()
            },
            "times_plain": round(
                statistics.median(a / b for a, b in zip(pairs["plain"], pairs["ours"], strict=True)), 3
            ),
        }
    questions = [[*prompts[-1], *prompt[: PROMPT_TOKENS // 2]] for prompt in prompts[:8] for _ in range(8)]
    pairs = paired(
        {
            way: lambda kept=kept: engines.ours(  # type: ignore[misc]
                questions, [tokens] * len(questions), prefix_tokens=kept, apart_s=0.005
            )
            for way, kept in (("kept", 16_384), ("computed", 0))
        },
        runs,
    )
    found["groups"] = {
        "seconds": {way: summary(values) for way, values in pairs.items()},
        "times_computed": round(
            statistics.median(a / b for a, b in zip(pairs["computed"], pairs["kept"], strict=True)), 3
        ),
    }
    return found


def paired(ways: dict[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """Return the seconds of each way after a warm-up; ways alternate, so that their ratios can be paired."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(runs + 1):
        for way, run in ways.items():
            begun = time.perf_counter()
            run()
            if number:
                seconds[way].append(time.perf_counter() - begun)
    return seconds


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128, help="tokens to sample per row")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--model", type=Path, help="folder of the only model to measure")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="for --model")
    parser.add_argument(
        "--smoke", action="store_true", help="few tokens, one run, one model, only to see that it works"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed prints to standard output that it found none
    tokens, runs = (8, 1) if given.smoke else (given.tokens, given.runs)
    models: dict[str, Any] = {}
    if given.model is not None:
        models[given.model.name] = {"batch": race(given.model, given.threads, tokens, runs, given.dtype)}
    for name in () if given.model else ("quickstart",) if given.smoke else SIZES:
        with tempfile.TemporaryDirectory() as folder:
            train_tokenizer([f"What is {number} + 7?" for number in range(300)], folder, vocab_size=512)
            parameters = create_tiny_model(folder, folder, seed=0, **SIZES[name])
            models[name] = {
                "parameters": parameters,
                "batch": race(Path(folder), given.threads, tokens, runs),
            }
    result = {
        "benchmark": "engine",
        "runs": runs,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": tokens,
        "threads": given.threads,
        "models": models,
        "target_times_plain": 1.0,
        "environment": environment(["torch", "transformers"]),
    }
    report(result, given.out)


if __name__ == "__main__":
    main()
