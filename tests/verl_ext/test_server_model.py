from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from extras import needs
from known_tool import KnownTool

from afm.agents import load_agent
from afm.errors import EngineError
from afm.models.base import FinishReason, SamplingParams
from afm.models.tokenizer import ChatTokenizer
from afm.rollout import Episode, run_episode
from afm.trajectory.record import Cost, StopReason
from afm.trajectory.tags import Author
from verl_ext.training_sample import ServerModel, engine_params, room_of

needs("verl")

PARAMS = SamplingParams(
    max_new_tokens=50, temperature=0.7, top_p=0.9, top_k=0, stop=("</code>", "</answer>"), seed=11
)


def token_output(**fields: Any) -> Any:
    from verl.workers.rollout.replica import TokenOutput

    return TokenOutput(**fields)


CODE = {"code": KnownTool("code", lambda argument: "25")}


@pytest.fixture
def serve(tokenizer: Any) -> Callable[..., ServerModel]:
    def make(servers: Any, *, engine: str = "vllm", context_tokens: int = 100) -> ServerModel:
        chat = ChatTokenizer(tokenizer)
        return ServerModel(servers, chat, engine=engine, request_id="one", context_tokens=context_tokens)

    return make


@pytest.fixture
def model(serve: Any, scripted: Any) -> Callable[..., tuple[ServerModel, Any]]:
    def make(*outputs: Any) -> tuple[ServerModel, Any]:
        servers = scripted(outputs)
        return serve(servers), servers

    return make


def test_every_engine_keeps_the_stop_string_in_its_output() -> None:
    common = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    common |= {"stop": ["</code>", "</answer>"]}
    assert engine_params("vllm", PARAMS) == common | {"max_tokens": 50, "include_stop_str_in_output": True}
    assert engine_params("sglang", PARAMS) == common | {"max_new_tokens": 50, "no_stop_trim": True}
    assert engine_params("afm_cpu", PARAMS) == common | {"max_tokens": 50, "seed": 11}
    with pytest.raises(EngineError, match="expected vllm, sglang or afm_cpu"):
        engine_params("trtllm", PARAMS)


@pytest.mark.parametrize(
    ("text", "reason", "finish"),
    [
        ("<code>1</code>\n", "completed", FinishReason.STOP),
        ("so far<|im_end|>", "completed", FinishReason.END_OF_TEXT),
        ("<code>1</code", "completed", FinishReason.END_OF_TEXT),
        ("<code>1</code", "length", FinishReason.LENGTH),  # SGLang, where its context ends earlier
        ("<code>1</code>", "aborted", FinishReason.ABORTED),
    ],
)
async def test_the_end_is_read_off_the_tokens(
    model: Any, said: Any, text: str, reason: str, finish: FinishReason
) -> None:
    episode, _ = model(said(text, stop_reason=reason))
    assert (await episode.generate([1, 2], PARAMS)).finish is finish


@pytest.mark.parametrize("reason", ["completed", "length"])
@pytest.mark.parametrize(
    ("kept", "beyond"),
    [
        ("<code>1</code>", "\n<observation>Paris</observation>"),
        ("<think>x</think><answer>5</answer>", " 1 <code>1</code>"),  # the first of several counts
        ("<code>é 12</code>", "é"),
    ],
)
async def test_what_an_engine_samples_beyond_a_stop_string_is_cut(
    model: Any, said: Any, tokenizer: Any, kept: str, beyond: str, reason: str
) -> None:
    output = said(kept + beyond, stop_reason=reason)
    ids, first = list(output.token_ids), tokenizer.encode(kept, add_special_tokens=False)
    output.log_probs = [-float(at) for at in range(len(ids))]
    episode, _ = model(output)
    result = await episode.generate([1, 2], SamplingParams(max_new_tokens=len(ids), stop=PARAMS.stop))
    assert result.finish is FinishReason.STOP
    assert result.token_ids == tuple(ids[: len(first)])
    assert episode.decode(result.token_ids) == kept
    assert result.logprobs == tuple(-float(at) for at in range(len(first)))


async def test_a_stop_string_in_many_small_tokens_far_from_the_end_is_seen(
    model: Any, said: Any, tokenizer: Any
) -> None:
    """SGLang checks as many tokens as its own encoding has, and one more. These are more, so it continues."""
    pieces = [tokenizer.encode(character, add_special_tokens=False) for character in "<code>1</code>"]
    begin = [token for piece in pieces for token in piece]
    ids = [*begin, *tokenizer.encode(" 12" * 40, add_special_tokens=False)]
    episode, _ = model(said("", token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason="stop"))
    result = await episode.generate([1], SamplingParams(max_new_tokens=500, stop=PARAMS.stop))
    assert (result.token_ids, result.finish) == (tuple(begin), FinishReason.STOP)


@pytest.mark.parametrize(
    ("engine", "most", "room"),
    [
        ("sglang", 36864, 32768),  # prompt + response = 2,048 + 30,720
        ("sglang", 32770, 32764),
        ("sglang", None, 32762),
        ("vllm", 30000, 30000),
        ("afm_cpu", None, 32768),
    ],
)
def test_an_episode_has_the_room_of_its_engine_and_sglang_keeps_the_last_tokens(
    engine: str, most: int | None, room: int
) -> None:
    rollout = SimpleNamespace(name=engine, prompt_length=2048, response_length=30720, max_model_len=most)
    assert room_of(rollout) == room


@pytest.mark.parametrize("fill", [0, 1])
async def test_an_episode_ends_before_sglang_would_refuse_its_prompt(
    serve: Any, scripted: Any, said: Any, fill: int
) -> None:
    """A context of 60 tokens accepts inputs of at most 53. It rejects 60 - 6 or more."""
    servers = scripted([said("1")])
    rollout = SimpleNamespace(name="sglang", prompt_length=30, response_length=30, max_model_len=60)
    episode = serve(servers, engine="sglang", context_tokens=room_of(rollout))
    played = await run_episode(load_agent("math"), episode, CODE, "1 + 1", prompt_ids=[1] * (53 + fill))
    if fill:
        assert (played.stop, servers.requests) == (StopReason.RESPONSE_TOKENS, [])
    else:
        assert servers.requests[0]["params"]["max_new_tokens"] == 1


class StoppingServer:
    """Stops as vLLM and SGLang do: at a stop string in the new text of a request."""

    def __init__(self, said: Sequence[Sequence[int]], cut: int, decode: Any) -> None:
        self.left = [list(ids) for ids in said]
        self.cut = cut
        self.decode = decode
        self.generate = self  # as a Ray actor's method

    async def remote(self, sampling_params: dict[str, Any], **unused: Any) -> Any:
        aborts, ids = self.cut > 0, self.left[0]
        count = 0
        while count < len(ids) and not (aborts and count == self.cut):
            count += 1
            if any(stop in self.decode(ids[:count]) for stop in sampling_params["stop"]):
                aborts = False
                break
        sampled, self.left[0] = ids[:count], ids[count:]
        if not aborts:
            self.left.pop(0)
        self.cut = 0
        return token_output(
            token_ids=sampled,
            log_probs=[-0.5] * len(sampled),
            stop_reason="aborted" if aborts else "completed",
            extra_fields={"global_steps": 1 if aborts else 2},
        )


def resuming_client(server: StoppingServer) -> Any:
    """Return verl's own client of asynchronous trainers, with one server and without Ray."""
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

    class Client(FullyAsyncLLMServerClient):
        async def _acquire_server(self, request_id: str, **extra: Any) -> Any:
            return "server", server

        def _release_server(self, server_id: str, request_id: str | None = None) -> None:
            pass

    rollout = SimpleNamespace(name="vllm", full_determinism=False, response_length=2000)
    return Client(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))


@pytest.mark.slow
@pytest.mark.parametrize("back", [1, 3])
async def test_an_update_of_the_weights_inside_a_closing_tag_changes_nothing(
    serve: Any, tokenizer: Any, back: int
) -> None:
    """The abort comes ``back`` tokens before the end of ``</code>``. The model then continues as if it had not stopped."""
    call, answer = "<code>print(12+13)</code>", "<answer>25</answer>"
    more = "\n<observation>12</observation><think>so</think>"
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (call, call + more, answer)]
    server = StoppingServer(ids[1:], cut=len(ids[0]) - back, decode=tokenizer.decode)
    episode = serve(resuming_client(server), context_tokens=2000)
    played = await run_episode(load_agent("math"), episode, CODE, "12 + 13", prompt_ids=[1, 2, 3])
    assert played.stop is StopReason.ANSWER
    assert [segment.text for segment in played.segments if segment.author is Author.AGENT] == [call, answer]
    assert episode.drift(played) == 0
    assert played.cost.agent_tokens == len(ids[0]) + len(ids[2])
    assert episode.weight_versions == [1, 2, 2, 2]


async def test_no_generation_outlives_an_episode_that_ran_out_of_time(serve: Any) -> None:
    """A cancelled wait does not cancel the Ray actor's work, and engines must be idle before they sleep."""
    done = []

    async def generation(ids: list[int]) -> Any:
        await asyncio.sleep(0.8)
        done.append(ids)
        return token_output(token_ids=ids, log_probs=[-0.5] * len(ids))

    class Servers:
        async def generate(self, request_id: str, prompt_ids: list[int], **unused: Any) -> Any:
            return await asyncio.shield(generation(prompt_ids))

    spec = load_agent("math")
    limits = spec.limits.model_copy(update={"max_seconds": 0.5})
    episode = serve(Servers(), context_tokens=500)
    played = await run_episode(spec, episode, CODE, "1 + 1", limits=limits, prompt_ids=[5, 6, 7])
    assert done == [[5, 6, 7]]
    assert played.response_ids == (5, 6, 7)


async def test_a_full_budget_is_the_limit(model: Any, said: Any) -> None:
    episode, _ = model(said("12345"))
    result = await episode.generate([1], SamplingParams(max_new_tokens=5, stop=("</code>",)))
    assert result.finish is FinishReason.LENGTH
    assert (episode.decode(result.token_ids), result.logprobs) == ("12345", (-0.5,) * 5)


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


async def test_failing_servers_and_tokens_without_probabilities_are_engine_errors(
    model: Any, said: Any
) -> None:
    episode, _ = model(RuntimeError("out of memory"), said("12", log_probs=None))
    with pytest.raises(EngineError, match="RuntimeError: out of memory"):
        await episode.generate([1], PARAMS)
    with pytest.raises(EngineError, match=r"2 tokens and 0 log-probabilities.*calculate_log_probs"):
        await episode.generate([1], PARAMS)


async def test_tokens_that_nobody_sampled_are_counted(model: Any, said: Any) -> None:
    exact = Episode((1, 2), (3, 4, 9, 5, 6), (1, 1, 0, 1, 1), (0.0,) * 5, (), (), StopReason.ANSWER, Cost())

    async def played(second: list[int], *outputs: list[int]) -> ServerModel:
        made = [said("x", token_ids=ids, log_probs=[0.0] * len(ids)) for ids in outputs]
        episode: ServerModel = model(*made)[0]
        for prompt in ([1, 2], second):
            await episode.generate(prompt, SamplingParams(max_new_tokens=4))
        return episode

    same = await played([1, 2, 3, 4, 9], [3, 4, 7, 5, 6], [5, 6])  # 7, 5, 6 came after a stop string
    assert same.drift(exact) == 0
    # An answer to another text than what stands before it counts as a whole.
    assert same.drift(replace(exact, response_ids=(3, 8, 9, 5, 6))) == 3
    assert same.drift(replace(exact, response_mask=(1, 1, 1, 1, 1))) == 1
    assert (await played([1, 8, 3, 4, 9], [3, 4], [5, 6])).drift(exact) == 2
    # What was sampled beyond a stop string may be the environment's next token; it counts for neither.
    assert (await played([1, 2, 3, 4, 9], [3, 4, 9], [5, 6])).drift(exact) == 0
