from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from afm.errors import EngineError
from afm.models.base import FinishReason, SamplingParams
from afm.models.tokenizer import ChatTokenizer
from verl_ext.server_model import ServerModel, engine_params

PARAMS = SamplingParams(
    max_new_tokens=50, temperature=0.7, top_p=0.9, top_k=0, stop=("</code>", "</answer>"), seed=11
)


@pytest.fixture
def model(tokenizer: Any, scripted: Any) -> Callable[..., tuple[ServerModel, Any]]:
    def make(*outputs: Any) -> tuple[ServerModel, Any]:
        servers = scripted(outputs)
        made = ServerModel(
            servers, ChatTokenizer(tokenizer), engine="vllm", request_id="one", context_tokens=100
        )
        return made, servers

    return make


def test_every_engine_keeps_the_stop_string_in_its_output() -> None:
    common = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
        "stop": ["</code>", "</answer>"],
    }
    assert engine_params("vllm", PARAMS) == common | {"max_tokens": 50, "include_stop_str_in_output": True}
    assert engine_params("sglang", PARAMS) == common | {"max_new_tokens": 50, "no_stop_trim": True}
    assert engine_params("afm_cpu", PARAMS) == common | {"max_tokens": 50, "seed": 11}


def test_an_engine_with_unknown_stop_parameters_is_refused() -> None:
    with pytest.raises(EngineError, match="expected vllm, sglang or afm_cpu"):
        engine_params("trtllm", PARAMS)


@pytest.mark.parametrize(
    ("text", "reason", "finish"),
    [
        ("<code>1</code>", "completed", FinishReason.STOP),
        ("<code>1</code>\n", "completed", FinishReason.STOP),
        ("so far<|im_end|>", "completed", FinishReason.END_OF_TEXT),
        ("<code>1</code", "completed", FinishReason.END_OF_TEXT),
        ("<code>1</code>", "aborted", FinishReason.ABORTED),
    ],
)
async def test_the_end_is_read_off_the_tokens(
    model: Any, said: Any, text: str, reason: str, finish: FinishReason
) -> None:
    episode, _ = model(said(text, stop_reason=reason))
    assert (await episode.generate([1, 2], PARAMS)).finish is finish


async def test_a_full_budget_is_the_limit(model: Any, said: Any) -> None:
    output = said("12345")
    episode, _ = model(output)
    result = await episode.generate([1], SamplingParams(max_new_tokens=5, stop=("</code>",)))
    assert result.finish is FinishReason.LENGTH
    assert result.token_ids == tuple(output.token_ids)
    assert result.logprobs == (-0.5,) * 5


async def test_all_turns_of_an_episode_go_to_one_server_and_versions_are_kept(model: Any, said: Any) -> None:
    first = said("a", extra_fields={"min_global_steps": 3, "max_global_steps": 3}, num_preempted=1)
    second = said("b", extra_fields={"min_global_steps": 4, "max_global_steps": 5}, num_preempted=2)
    episode, servers = model(first, second)
    await episode.generate([1, 2], PARAMS)
    await episode.generate([1, 2, 3], PARAMS)
    assert [request["id"] for request in servers.requests] == ["one", "one"]
    assert servers.requests[1]["prompt"] == [1, 2, 3]
    assert (min(episode.weight_versions), max(episode.weight_versions)) == (3, 5)
    assert episode.preempted == 3


async def test_a_failing_server_is_an_engine_error(model: Any) -> None:
    episode, _ = model(RuntimeError("out of memory"))
    with pytest.raises(EngineError, match="RuntimeError: out of memory"):
        await episode.generate([1], PARAMS)


async def test_tokens_without_probabilities_cannot_be_trained_on(model: Any, said: Any) -> None:
    episode, _ = model(said("12", log_probs=None))
    with pytest.raises(EngineError, match=r"2 tokens and 0 log-probabilities.*calculate_log_probs"):
        await episode.generate([1], PARAMS)


def test_text_becomes_tokens_and_back(model: Any, tokenizer: Any) -> None:
    episode, _ = model()
    text = "<think>é 12</think>"
    assert episode.decode([*episode.encode(text), tokenizer.eos_token_id]) == text
    assert episode.context_tokens == 100


def test_a_prompt_goes_through_the_chat_template(model: Any, tokenizer: Any) -> None:
    episode, _ = model()
    ids = episode.encode_prompt([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
