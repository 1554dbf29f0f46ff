import math

import pytest
import torch

from afm.models.base import SamplingParams
from afm.models.sampling import BatchSampler, Draw, stream_key


def sampler(*params, seeds=None, drawn=0):
    seeds = seeds or range(len(params))
    return BatchSampler(
        [Draw(item, stream_key(seed), drawn) for item, seed in zip(params, seeds, strict=True)], "cpu"
    )


def frequencies(params, probabilities, rows=20_000):
    """Shares of the tokens that ``rows`` rows with seeds of their own draw from one distribution."""
    logits = torch.tensor(probabilities).log().repeat(rows, 1)
    tokens, _ = sampler(*[params] * rows).sample(logits)
    return [round(share, 3) for share in (tokens.bincount(minlength=len(probabilities)) / rows).tolist()]


@pytest.mark.parametrize(
    ("options", "probabilities", "expected"),
    [
        ({}, [0.5, 0.25, 0.125, 0.125], [0.5, 0.25, 0.125, 0.125]),
        ({}, [0.0, 0.5, 0.0, 0.5, 0.0], [0, 0.5, 0, 0.5, 0]),  # what is impossible is never drawn
        ({"temperature": 0.5}, [0.6, 0.4], [9 / 13, 4 / 13]),  # p^2 is (.36, .16), normalised
        ({"top_k": 2}, [0.1, 0.5, 0.1, 0.3], [0, 5 / 8, 0, 3 / 8]),
        # .5 + .3 = .8 >= .75; without .3 it would be too little
        ({"top_p": 0.75}, [0.15, 0.5, 0.05, 0.3], [0, 5 / 8, 0, 3 / 8]),
        # top-k 2 leaves .5 and .3, of which .5 is already 62.5 %
        ({"top_k": 2, "top_p": 0.6}, [0.2, 0.5, 0.3], [0, 1, 0]),
        ({"top_p": 1e-6}, [0.3, 0.4, 0.3], [0, 1, 0]),
    ],
)
def test_tokens_come_as_often_as_they_should(options, probabilities, expected):
    shares = frequencies(SamplingParams(1, **options), probabilities)
    assert shares == pytest.approx(expected, abs=0.012)
    assert [share for share, value in zip(shares, expected, strict=True) if value in (0, 1)] == [
        value for value in expected if value in (0, 1)
    ]


def test_logprobs_have_the_temperature_but_not_the_filters():
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(3, 1)
    params = (
        SamplingParams(1, temperature=0),
        SamplingParams(1, temperature=0.5, top_k=1),
        SamplingParams(1, top_k=1),
    )
    tokens, logprobs = sampler(*params).sample(logits)
    plain = 2 - math.log(1 + math.e + math.e**2)
    halved = 4 - math.log(1 + math.e**2 + math.e**4)
    assert tokens.tolist() == [2, 2, 2]
    assert logprobs.tolist() == pytest.approx([plain, halved, plain], abs=1e-6)


def test_rows_of_all_kinds_share_a_batch():
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().repeat(4, 1)
    params = [
        SamplingParams(1, temperature=0),
        SamplingParams(1),
        SamplingParams(1, top_k=1),
        SamplingParams(1, top_p=0.3, temperature=0.7),
    ]
    together, _ = sampler(*params, seeds=[1, 2, 3, 4]).sample(logits)
    alone = [sampler(item, seeds=[seed]).sample(logits[:1])[0].item() for seed, item in enumerate(params, 1)]
    assert together.tolist() == alone
    assert (alone[0], alone[2], alone[3]) == (3, 3, 3)


def test_the_stream_depends_on_seed_and_count_only():
    logits = torch.zeros(1, 1000)
    running = sampler(SamplingParams(1), seeds=[5])
    draws = [running.sample(logits)[0].item() for _ in range(10)]
    resumed = sampler(SamplingParams(1), seeds=[5], drawn=6)
    assert [resumed.sample(logits)[0].item() for _ in range(4)] == draws[6:]
    assert len(set(draws)) > 5


def test_neighbouring_seeds_and_counts_are_unrelated():
    logits = torch.zeros(400, 2)
    step = sampler(*[SamplingParams(1)] * 400, seeds=range(400))
    first, second = step.sample(logits)[0].float(), step.sample(logits)[0].float()
    for left, right in ((first, second), (first[1:], first[:-1]), (first[1:], second[:-1])):
        correlation = torch.corrcoef(torch.stack([left, right]))[0, 1].item()
        assert abs(correlation) < 0.2


def test_negative_and_huge_seeds_are_seeds():
    assert len({stream_key(seed) for seed in (-1, 0, 1, 2**64 - 2, 2**63)}) == 5
