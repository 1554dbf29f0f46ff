import pytest
from pydantic import ValidationError

from afm.planning import ModelShape
from afm.planning.speed import (
    Assumptions,
    compute_s,
    decode_tokens_per_s,
    forward_flops,
    training_flops,
)

TINY = ModelShape(
    hidden=4, layers=2, heads=2, kv_heads=1, head_dim=2, mlp=8, vocab=10, tied=False, qkv_bias=False,
    head_norms=False, max_positions=64,
)  # fmt: skip
# a layer: q 4x4, k 4x2, v 4x2, o 4x4, three of 4x8, two norms of 4 = 16 + 8 + 8 + 16 + 96 + 8 = 152
PARAMETERS = 2 * 152 + 4 + 2 * 40


def test_a_token_costs_two_flops_a_parameter_but_for_the_lookup_and_the_products_with_earlier_ones():
    assert TINY.parameters == PARAMETERS == 388
    attention = 2 * 2 * 2 * 2 * 6  # 2 layers x 2 heads x 2 features, 4 FLOPs for each of 6 / 2 earlier tokens
    assert forward_flops(TINY, 3, 6) == 3 * (2 * (388 - 40) + attention)


def test_an_update_costs_three_passes_and_one_more_with_checkpointing():
    once = forward_flops(TINY, 3, 6)
    assert training_flops(TINY, 3, 6, checkpointing=False) == 3 * once
    assert training_flops(TINY, 3, 6, checkpointing=True) == 4 * once


def test_seconds_follow_from_peak_and_utilisation():
    assert compute_s(8e12, 2, 0.5, Assumptions(peak_tflops=4)) == pytest.approx(2.0)


def test_decoding_is_bound_by_what_it_reads_or_by_what_it_computes():
    slow_memory = Assumptions(bandwidth_tb_s=1e-9, decode_bandwidth=0.5, peak_tflops=1e6)
    read = 2 * 388 + 8 * 10 * (2 * 2 * 2 * 1 * 2)  # weights, and 8 sequences of 10 cached tokens in bf16
    assert decode_tokens_per_s(TINY, 1, 8, 10, slow_memory) == pytest.approx(8 / (read / 500))
    slow_chip = Assumptions(bandwidth_tb_s=1e6, peak_tflops=1e-9, prefill_mfu=0.5)
    flops = forward_flops(TINY, 8, 20)
    assert decode_tokens_per_s(TINY, 1, 8, 10, slow_chip) == pytest.approx(8 / (flops / 500))


def test_more_gpus_than_heads_keep_copies_of_the_cache():
    memory = Assumptions(bandwidth_tb_s=1e-9, decode_bandwidth=0.5, peak_tflops=1e6)
    read = 2 * 388 + 8 * 10 * (2 * 2 * 2 * 4 * 2)
    assert decode_tokens_per_s(TINY, 4, 8, 10, memory) == pytest.approx(8 / (read / (4 * 500)))


@pytest.mark.parametrize("given", [{"train_mfu": 1.5}, {"groups": 0.5}, {"mfu": 0.3}])
def test_impossible_assumptions_are_refused(given):
    with pytest.raises(ValidationError):
        Assumptions(**given)
