from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from afm.memory_arithmetic import Hardware
from afm.models.tiny import train_tokenizer
from verl_ext.sizes import Placement, RolloutEngine, RunSizes

TEXTS = [
    "Tom has 12 coins. Tom finds 13 more. How many coins does Tom have?",
    "<plan>Write one expression and run it.</plan><think>The expression is 12+13.</think>",
    "<code>\n```py\nprint(12+13)\n```\n</code>\n<observation>\n25\n</observation>\n",
    "<reflection>The result is 25.</reflection><think>Done.</think><answer>\\boxed{25}</answer>",
]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS * 20, folder, vocab_size=300)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_dir)


@dataclass
class ServerOutput:
    """The output of verl's servers (verl.workers.rollout.replica.TokenOutput)."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str | None = "completed"
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class ScriptedServers:
    """Replaces verl's ``LLMServerClient``, and replays outputs of an engine."""

    outputs: Sequence[ServerOutput | Exception]
    requests: list[dict[str, Any]] = field(default_factory=list)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> ServerOutput:
        output = self.outputs[len(self.requests)]
        self.requests.append({"id": request_id, "prompt": prompt_ids, "params": sampling_params})
        if isinstance(output, Exception):
            raise output
        return output


@pytest.fixture
def scripted() -> type[ScriptedServers]:
    return ScriptedServers


@pytest.fixture
def said(tokenizer: Any) -> Callable[..., ServerOutput]:
    """Make the output of a server that generated a text."""

    def make(text: str, **changes: Any) -> ServerOutput:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return ServerOutput(**{"token_ids": ids, "log_probs": [-0.5] * len(ids)} | changes)

    return make


@pytest.fixture
def sizes() -> RunSizes:
    """A small run: 2 nodes of 4 GPUs, engines of 2, data ranks of 2, DAPO on samples of up to 100 + 900 tokens."""
    return RunSizes(
        hardware=Hardware(nodes=2, gpus=4, gpu_gib=80.0),
        engine=RolloutEngine(
            name="sglang", own_gpus=None, node_gpus=4, tensor_parallel=2, data_parallel=1, memory_share=0.5,
            model_len=1000, sleeps=True,
        ),
        actor=Placement(
            tokens=500, shards=8, moves_parameters=True, moves_optimizer=True, stays_on_cpu=False
        ),
        reference=None, critic=None, prompt=100, response=900, batch=16, mini_batch=8, gen_batch=None, samples=8,
        passes=1, filtered=True, ahead=False, packed=True, sequence_parallel=2, critic_parallel=1, log_prob_tokens=500, entropy_bonus=False,
        fused_logits=False, checkpointing=True, lora_rank=0, steps=10, save_every=5, kept=2,
        saved=("model", "optimizer", "extra"),
    )  # fmt: skip
