"""The forecast before a pre-trained model is trained: memory and minutes, from shapes and settings only."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from extras import needs

from afm.cli.pipeline import Quickstart
from afm.cli.recipes import MATH_FROM_BASE
from afm.cli.train import forecast
from afm.errors import ConfigError
from afm.file_kinds import configs_folder
from afm.memory_arithmetic import GIB, model_shape, multiplies_bfloat16

needs("llamafactory", "verl", "torch")

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49_152,
    "tie_word_embeddings": True,
}
LARGE_BATCHES = ("ppo_micro_batch_size_per_gpu=32", "log_prob_micro_batch_size_per_gpu=64")


def job_from(folder: Path, *rl: str, **sizes: int) -> Quickstart:
    """A quickstart from a model of which only the settings are there."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMOLLM2 | sizes))
    plan = replace(MATH_FROM_BASE.full, rl=rl)
    ignored = lambda *_: None  # noqa: E731
    return Quickstart(folder / "out", configs_folder(), MATH_FROM_BASE, plan, 0, None, ignored, str(folder))


def rl_memory(job: Quickstart) -> float:
    from verl_ext.compose import compose, overrides_of
    from verl_ext.memory_arithmetic import cpu_need
    from verl_ext.settings import load_settings
    from verl_ext.sizes import sizes_of

    shape = model_shape(str(job.base))
    assert shape is not None
    return cpu_need(sizes_of(compose(overrides_of(load_settings(*job.training("rl"))))), shape).total / GIB


@pytest.mark.slow
def test_micro_batches_that_ran_out_of_24_gib_are_seen_to(tmp_path: Path) -> None:
    actor, rollout = (f"verl.actor_rollout_ref.{part}" for part in ("actor", "rollout"))
    large = (f"{actor}.{LARGE_BATCHES[0]}", f"{rollout}.{LARGE_BATCHES[1]}")
    assert rl_memory(job_from(tmp_path)) < 14
    assert rl_memory(job_from(tmp_path, *large)) > 24


@pytest.mark.slow
def test_minutes_and_memory_are_said_and_too_large_a_model_is_refused(tmp_path: Path) -> None:
    job = job_from(tmp_path / "small", hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    said = forecast(job.training("sft"), job.training("rl"), 8)
    match = re.fullmatch(r"3 M parameters, about \d+ minutes and (\d+) GiB in (float32.*|bfloat16)", said)
    assert match
    assert 7 <= int(match[1]) <= 11
    job = job_from(tmp_path / "large", num_hidden_layers=3000)
    with pytest.raises(
        ConfigError, match=r"the run needs [\d.]+ GiB = states .* are free; choose a smaller --base"
    ):
        job.import_base()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 sse", True),
        ("flags\t\t: fpu amx_tile amx_bf16", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t\t: fpu avx2 avx512f", False),
        ("", False),
    ],
)
def test_bfloat16_is_used_where_the_processor_multiplies_it(flags: str, expected: bool) -> None:
    assert multiplies_bfloat16(f"processor\t: 0\n{flags}\nbugs\t: none\n") is expected
