import asyncio
import shutil

import pytest

from afm.errors import ConfigError, EngineError
from afm.models.base import FinishReason, SamplingParams
from afm.models.load import TransformersModel, load_model


@pytest.fixture
async def model(tiny_dir):
    model = load_model(tiny_dir, threads=1, device="cpu")
    yield model
    await model.close()


async def test_a_folder_becomes_a_model(model, tiny_dir):
    prompt = model.encode_prompt([{"role": "user", "content": "Tom has 3 apples."}])
    results = await asyncio.gather(*[model.generate(prompt, SamplingParams(20, seed=1)) for _ in range(2)])
    assert results[0].token_ids == results[1].token_ids
    assert results[0].logprobs == pytest.approx(results[1].logprobs, abs=1e-4)
    assert len(results[0].logprobs) == len(results[0].token_ids)
    assert (model.name, model.context_tokens) == (str(tiny_dir), 4096)


async def test_a_stream_shows_what_generate_returns(model):
    seen = []
    params = SamplingParams(15, seed=2)
    streamed = await model.stream([5, 6, 7], params, seen.append)
    assert streamed.token_ids == (await model.generate([5, 6, 7], params)).token_ids
    assert seen == list(streamed.token_ids)


async def test_a_model_computes_in_the_chosen_type(model, tiny_dir):
    rounded = load_model(tiny_dir, threads=1, device="cpu", dtype="bfloat16")
    prompt = list(range(5, 40))
    exact, near = await asyncio.gather(model.score(prompt), rounded.score(prompt))
    await rounded.close()
    gaps = [abs(one - other) for one, other in zip(exact, near, strict=True)]
    assert 1e-5 < max(gaps) < 0.5  # rounded, and still the same model


async def test_the_context_is_never_exceeded(model):
    generation = await model.generate([5] * 4090, SamplingParams(50, seed=1))
    assert len(generation.token_ids) <= 6
    assert generation.finish is not FinishReason.STOP
    with pytest.raises(EngineError, match="4096 tokens"):
        await model.generate([5] * 4096, SamplingParams(1))


async def test_a_smaller_context_counts_and_a_larger_one_is_refused(tiny_dir):
    small = load_model(tiny_dir, threads=1, device="cpu", context_tokens=8)
    assert len((await small.generate([5] * 6, SamplingParams(50, seed=1))).token_ids) <= 2
    with pytest.raises(EngineError, match="8 tokens, the model's context 8"):
        await small.generate([5] * 8, SamplingParams(1))
    await small.close()
    with pytest.raises(ConfigError, match="context_tokens is 5000; expected at most 4096"):
        load_model(tiny_dir, device="cpu", context_tokens=5000)


def test_broken_folders_are_named(tiny_dir, tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        load_model(tmp_path / "absent")
    folder = tmp_path / "half"
    shutil.copytree(tiny_dir, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no model can be loaded"):
        TransformersModel(folder)
