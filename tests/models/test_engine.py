import asyncio
import copy
import math
import random
import time

import pytest
import torch

from afm.errors import ConfigError, EngineError
from afm.models import cache
from afm.models.base import FinishReason, SamplingParams
from afm.models.engine import BatchEngine


def engine_of(model, tokenizer, *, eos_ids=(), max_batch=64, **options):
    return BatchEngine(
        model,
        eos_ids=eos_ids,
        pad_id=tokenizer.pad_token_id,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        vocabulary_size=len(tokenizer),
        max_batch=max_batch,
        **options,
    )


@pytest.fixture
async def start(tiny):
    """Starts engines, of a copy of the tiny model unless of another; they end with the test."""
    engines = []

    def make(model=None, **options):
        # A copy: an engine changes the attention of its model, and the plain model is what it is compared with.
        engines.append(engine_of(model or copy.deepcopy(tiny[0]), tiny[1], **options))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.close()


@pytest.fixture
def engine(start):
    return start()


@pytest.fixture
def model(tiny):
    """A copy of the tiny model, to be changed."""
    return copy.deepcopy(tiny[0])


def prompts(count, *, shortest=1, longest=60, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(3, 300) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def greedy_by_transformers(model, prompt, count):
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


def forward_logprobs(model, prompt, token_ids, temperature=1.0):
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *token_ids]])).logits[0].float() / temperature
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(token_ids).unsqueeze(1)).squeeze(1).tolist()


async def reached(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("never reached")


async def test_greedy_equals_transformers_generate_for_mixed_lengths_in_one_batch(engine, model):
    asked = prompts(12)
    lengths = [5 + 3 * index for index in range(12)]
    results = await asyncio.gather(
        *[
            engine.generate(prompt, SamplingParams(length, temperature=0))
            for prompt, length in zip(asked, lengths, strict=True)
        ]
    )
    for prompt, length, result in zip(asked, lengths, results, strict=True):
        assert list(result.token_ids) == greedy_by_transformers(model, prompt, length)
        assert result.finish is FinishReason.LENGTH


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_a_plain_forward_at_the_sampling_temperature(engine, tiny, temperature):
    asked = prompts(6)
    params = SamplingParams(40, temperature=temperature)
    results = await asyncio.gather(*[engine.generate(prompt, params) for prompt in asked])
    for prompt, result in zip(asked, results, strict=True):
        expected = forward_logprobs(tiny[0], prompt, result.token_ids, temperature)
        assert result.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("length", [1, 2, 512, 1100])  # logits are computed for 512 tokens together
async def test_given_tokens_are_scored_as_by_a_plain_forward(engine, tiny, length):
    ids = [5 + number * 7 % 300 for number in range(length)]
    expected = forward_logprobs(tiny[0], ids[:1], ids[1:]) if length > 1 else []
    assert await engine.score(ids) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(EngineError, match="cannot be fed"):
        await engine.score([*ids, 10**6])


async def test_results_do_not_depend_on_who_shares_the_batch(engine):
    asked = prompts(8, seed=1)
    kinds = [
        SamplingParams(30, temperature=0),
        SamplingParams(30, seed=11),
        SamplingParams(30, temperature=0.8, top_k=20, top_p=0.9, seed=12),
    ]
    wanted = [(prompt, kinds[index % 3]) for index, prompt in enumerate(asked)]
    alone = [await engine.generate(prompt, params) for prompt, params in wanted]
    crowd = [SamplingParams(length) for length in range(1, 40, 2)]

    async def later(delay, prompt, params):
        await asyncio.sleep(delay)
        return await engine.generate(prompt, params)

    others = [
        asyncio.create_task(later(0.002 * index, prompt, crowd[index]))
        for index, prompt in enumerate(prompts(20, longest=150, seed=2))
    ]
    together = await asyncio.gather(*[later(0.004 * index, *pair) for index, pair in enumerate(wanted)])
    await asyncio.gather(*others)
    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    for one, other in zip(alone, together, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


async def test_an_engine_seed_repeats_unseeded_requests(start):
    results = []
    for _ in range(2):
        engine = start(seed=5)
        results.append([await engine.generate([5, 6], SamplingParams(15)) for _ in range(2)])
    first, second = results
    assert [item.token_ids for item in first] == [item.token_ids for item in second]
    assert first[0].token_ids != first[1].token_ids


async def test_more_requests_than_rows_all_finish(start):
    engine = start(max_batch=3)
    results = await asyncio.gather(
        *[engine.generate(prompt, SamplingParams(1 + index)) for index, prompt in enumerate(prompts(11))]
    )
    assert [len(result.token_ids) for result in results] == list(range(1, 12))


async def test_an_end_token_ends_the_text_and_is_kept(start, model):
    free = greedy_by_transformers(model, [10, 20, 30], 30)
    end = free[12]
    engine = start(eos_ids=[end])
    result = await engine.generate([10, 20, 30], SamplingParams(30, temperature=0))
    assert list(result.token_ids) == free[: free.index(end) + 1]
    assert result.finish is FinishReason.END_OF_TEXT


async def test_a_stop_string_over_several_tokens_ends_at_the_token_that_completes_it(engine, tiny):
    model, tokenizer = tiny
    prompt = [10, 20, 30]
    free = greedy_by_transformers(model, prompt, 40)
    stop = tokenizer.decode(free[18:21])
    shortest = next(n for n in range(1, 41) if stop in tokenizer.decode(free[:n]))
    result = await engine.generate(prompt, SamplingParams(40, temperature=0, stop=("@@nowhere", stop)))
    assert list(result.token_ids) == free[:shortest]
    assert result.finish is FinishReason.STOP
    assert result.token_ids != tuple(free)


async def test_a_slow_reader_of_tokens_does_not_hold_up_a_cancelled_request(engine):
    """The event loop is blocked until a hundred tokens wait to be shown; then somebody gives up."""
    seen = []

    def slow(token):
        seen.append(token)
        if len(seen) == 1:
            while engine.stats.sampled_tokens < 100:
                time.sleep(0.01)
            asking.cancel()

    asking = asyncio.create_task(engine.generate([5, 6], SamplingParams(1_000_000), on_token=slow))
    with pytest.raises(asyncio.CancelledError):
        await asking
    shown = len(seen)
    assert shown < 50
    await asyncio.sleep(0.05)
    assert len(seen) == shown


async def test_cancelling_the_caller_frees_the_row(start):
    engine = start(max_batch=1)
    endless = asyncio.create_task(engine.generate([5, 6], SamplingParams(1_000_000)))
    await asyncio.sleep(0.1)
    waiting = asyncio.create_task(engine.generate([5, 6], SamplingParams(1_000_000)))
    await asyncio.sleep(0.05)
    for task in (endless, waiting):
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    result = await asyncio.wait_for(engine.generate([5, 6], SamplingParams(3)), 5)
    assert len(result.token_ids) == 3


async def test_abort_returns_the_tokens_so_far_and_the_engine_goes_on(start):
    engine = start(max_batch=2)
    tasks = [
        asyncio.create_task(engine.generate([5, 6], SamplingParams(1_000_000, seed=3))) for _ in range(3)
    ]
    await reached(lambda: engine.stats.sampled_tokens >= 30)
    assert await engine.abort_all() == 3
    results = await asyncio.gather(*tasks)
    assert {result.finish for result in results} == {FinishReason.ABORTED}
    assert [len(result.token_ids) > 10 for result in results] == [True, True, False]
    assert results[2].token_ids == ()
    length = len(results[0].token_ids)
    again = await engine.generate([5, 6], SamplingParams(length, seed=3))
    assert again.token_ids == results[0].token_ids


async def test_an_interrupted_generation_continues_its_random_numbers(engine):
    """verl's clients send the tokens back as part of the prompt, with the same seed."""
    whole = (await engine.generate([5, 6], SamplingParams(30, seed=3))).token_ids
    rest = await engine.generate([5, 6, *whole[:12]], SamplingParams(18, seed=3))
    assert rest.token_ids == whole[12:]


async def test_a_paused_engine_finishes_its_rows_and_admits_no_other(engine):
    running = asyncio.create_task(engine.generate([5, 6], SamplingParams(300)))
    await reached(lambda: engine.stats.steps >= 2)
    engine.pause()
    parked = asyncio.create_task(engine.generate([5, 6], SamplingParams(2)))
    assert len((await running).token_ids) == 300
    await asyncio.sleep(0.05)
    assert not parked.done()
    engine.resume()
    assert len((await parked).token_ids) == 2


async def test_new_weights_change_the_output_and_bad_ones_change_nothing(start, model):
    engine = start(model)
    greedy = SamplingParams(20, temperature=0)
    before = await engine.generate([5, 6, 7], greedy)
    name = "model.layers.1.mlp.down_proj.weight"
    good = model.state_dict()[name].clone()
    other = torch.randn_like(good)
    with pytest.raises(EngineError, match=r"no weight 'model\.layers\.9.*did you mean"):
        await engine.update_weights({name: other, "model.layers.9.mlp.down_proj.weight": other})
    with pytest.raises(EngineError, match="has shape"):
        await engine.update_weights([(name, other), ("model.norm.weight", torch.ones(3))])
    assert (await engine.generate([5, 6, 7], greedy)).token_ids == before.token_ids
    assert await engine.update_weights({name: other}) == 1
    after = await engine.generate([5, 6, 7], greedy)
    assert list(after.token_ids) == greedy_by_transformers(model, [5, 6, 7], 20)
    assert after.token_ids != before.token_ids
    await engine.update_weights({name: good})
    assert (await engine.generate([5, 6, 7], greedy)).token_ids == before.token_ids


async def test_weights_may_change_while_rows_are_in_flight(start, model):
    engine = start(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tasks = [asyncio.create_task(engine.generate([5, 6], SamplingParams(60, seed=4))) for _ in range(2)]
    for _ in range(5):
        await engine.update_weights(weights)
    results = await asyncio.gather(*tasks)
    assert results[0].token_ids == results[1].token_ids


async def test_a_failing_model_fails_every_request_and_the_engine_recovers(start, model):
    engine = start(model, max_batch=2)
    good = model.state_dict()["model.norm.weight"].clone()
    await engine.update_weights({"model.norm.weight": torch.full_like(good, math.nan)})
    tasks = [asyncio.create_task(engine.generate([5, 6], SamplingParams(5))) for _ in range(4)]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, EngineError) for outcome in outcomes)
    assert "not finite" in str(outcomes[0])
    await engine.update_weights({"model.norm.weight": good})
    assert len((await engine.generate([5, 6], SamplingParams(5))).token_ids) == 5


async def test_closing_fails_what_is_running_and_refuses_more(start):
    engine = start()
    running = asyncio.create_task(engine.generate([5, 6], SamplingParams(1_000_000)))
    await asyncio.sleep(0.05)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await running
    with pytest.raises(EngineError, match="closed"):
        await engine.generate([5, 6], SamplingParams(1))


@pytest.mark.parametrize("prompt", [[], [-1], [4, 10_000]])
async def test_impossible_prompts_are_refused(engine, prompt):
    with pytest.raises(EngineError, match="cannot be fed"):
        await engine.generate(prompt, SamplingParams(1))


@pytest.mark.parametrize(
    ("params", "word"),
    [
        (SamplingParams(0), "max_new_tokens"),
        (SamplingParams(1, temperature=-1), "temperature"),
        (SamplingParams(1, temperature=math.nan), "temperature"),
        (SamplingParams(1, top_p=0), "top_p"),
        (SamplingParams(1, top_k=-1), "top_k"),
        (SamplingParams(1, stop=("",)), "empty"),
    ],
)
async def test_meaningless_parameters_are_refused(engine, params, word):
    with pytest.raises(ConfigError, match=word):
        await engine.generate([5], params)


@pytest.mark.slow
async def test_prompts_over_the_prefill_budget_and_growing_batches_stay_exact(engine, model):
    long = prompts(6, shortest=1500, longest=2500, seed=9)
    short = asyncio.create_task(engine.generate([5, 6], SamplingParams(200, temperature=0)))
    results = await asyncio.gather(*[engine.generate(p, SamplingParams(4, temperature=0)) for p in long])
    for prompt, result in zip(long, results, strict=True):
        assert list(result.token_ids) == greedy_by_transformers(model, prompt, 4)
    assert list((await short).token_ids) == greedy_by_transformers(model, [5, 6], 200)


async def stopped_turns(engine, tokenizer, count):
    """First turns that stopped at a string, with the prompts their second turns would have."""
    stops = tuple(tokenizer.decode([token]) for token in range(40, 300, 12))
    params = SamplingParams(200, stop=stops)
    asked = prompts(count, seed=3)
    turns = await asyncio.gather(*[engine.generate(prompt, params) for prompt in asked])
    assert {turn.finish for turn in turns} == {FinishReason.STOP}
    observation = [9, 8, 7, 6, 5]
    return [
        [*prompt, *turn.token_ids, *observation[: index % 6]]
        for index, (prompt, turn) in enumerate(zip(asked, turns, strict=True))
    ]


async def test_a_second_turn_computes_only_what_is_new_and_gives_the_same(start, engine, tiny):
    model, tokenizer = tiny
    second = await stopped_turns(engine, tokenizer, 12)
    mixed = [*second, *prompts(4, seed=4)]
    results = await asyncio.gather(*[engine.generate(prompt, SamplingParams(20, seed=1)) for prompt in mixed])
    known = [len(prompt) - 1 - index % 6 for index, prompt in enumerate(second)]
    assert engine.stats.reused_tokens == sum(length for length in known if length >= 8)
    for prompt, result in zip(mixed, results, strict=True):
        expected = forward_logprobs(model, prompt, result.token_ids)
        assert result.logprobs == pytest.approx(expected, abs=1e-4)
    plain = start(prefix_tokens=0)
    again = await asyncio.gather(*[plain.generate(prompt, SamplingParams(20, seed=1)) for prompt in mixed])
    assert [result.token_ids for result in again] == [result.token_ids for result in results]
    assert plain.stats.reused_tokens == 0


async def test_prompts_with_a_common_beginning_compute_it_once_and_give_the_same(engine, tiny):
    system, question, other = prompts(3, shortest=20, longest=40, seed=5)
    seen = 0
    for prompt, known in (
        ([*system, *question], 0),
        ([*system, *question], len(system) + len(question) - 1),
        ([*system, 1, *other], len(system)),
        ([*system, *question, *other], len(system) + len(question) - 1),
        ([*question, *system], 0),
    ):
        params = SamplingParams(20, seed=len(prompt))
        results = await asyncio.gather(*[engine.generate(prompt, params) for _ in range(3)])
        for result in results:
            assert result.logprobs == pytest.approx(
                forward_logprobs(tiny[0], prompt, result.token_ids), abs=1e-4
            )
        assert engine.stats.reused_tokens - seen >= 3 * known
        assert engine.stats.reused_tokens - seen in {
            (3 - fresh) * (len(prompt) - 1) + fresh * known for fresh in (1, 2, 3)
        }
        seen = engine.stats.reused_tokens


async def test_nothing_is_reused_after_the_weights_changed(start, model, tiny):
    engine = start(model)
    second = await stopped_turns(engine, tiny[1], 3)
    weight = model.state_dict()["model.norm.weight"]
    await engine.update_weights({"model.norm.weight": weight * 1.5})
    results = await asyncio.gather(*[engine.generate(p, SamplingParams(20, temperature=0)) for p in second])
    assert engine.stats.reused_tokens == 0
    for prompt, result in zip(second, results, strict=True):
        assert list(result.token_ids) == greedy_by_transformers(model, prompt, 20)


@pytest.mark.slow
async def test_rows_in_flight_while_weights_change_leave_nothing_behind(start, model, tiny):
    engine, tokenizer = start(model), tiny[1]
    free = (await engine.generate([5, 6, 7], SamplingParams(1000, seed=2))).token_ids
    text = tokenizer.decode(free)
    stop = next(
        text[at : at + 4] for at in range(len(text) * 3 // 4, len(text)) if text.find(text[at : at + 4]) == at
    )
    task = asyncio.create_task(engine.generate([5, 6, 7], SamplingParams(1000, seed=2, stop=(stop,))))
    await reached(lambda: engine.stats.steps >= 1020)
    reused = engine.stats.reused_tokens
    await engine.update_weights(dict(model.state_dict()))
    turn = await task
    assert turn.finish is FinishReason.STOP
    assert len(turn.token_ids) > 30
    await engine.generate([5, 6, 7, *turn.token_ids], SamplingParams(1))
    assert engine.stats.reused_tokens == reused


async def test_on_a_cpu_single_tokens_use_the_attention_of_rows(start, tiny, monkeypatch):
    lengths = []
    plain = cache.rows_attention

    def watched(module, query, *words, **rest):
        lengths.append(query.shape[2])
        return plain(module, query, *words, **rest)

    monkeypatch.setattr(cache, "rows_attention", watched)
    await start().generate(prompts(1, shortest=9)[0], SamplingParams(max_new_tokens=5))
    assert lengths.count(1) == 5 * tiny[0].config.num_hidden_layers


async def test_layers_with_windows_are_refused(start, model):
    model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(ConfigError, match="sliding_attention"):
        start(model)
