import random

import pytest
import torch

from afm.models.cache import PrefixStore, RowCache, rows_attention

HEADS, SIZE = 2, 3


def states(tokens):
    """States that tell row, token number and side apart: shape [rows, heads, tokens, size]."""
    keys = torch.tensor(tokens, dtype=torch.float32)[:, None, :, None].expand(-1, HEADS, -1, SIZE)
    return keys.contiguous(), -keys


def seen(cache, layer, row):
    """What a row's next token would attend to, by writing it."""
    cache.open_column()
    new = torch.zeros(cache.rows, HEADS, 1, SIZE)
    keys, values = cache.update(new, new, layer)
    first = keys.shape[2] - 1 - cache.lengths()[row]
    assert torch.equal(keys[row], -values[row])
    assert bool((keys[row, :, -1] == 0).all())
    return keys[row, 0, first:-1, 0].tolist()


@pytest.mark.slow
def test_rows_keep_their_states_while_others_come_and_go():
    """A long random game against plain lists."""
    rng = random.Random(0)
    cache, model, fresh = RowCache(), [], iter(range(1, 100_000))
    for _ in range(300):
        action = rng.random()
        if action < 0.25 or not model:
            rows = [[next(fresh) for _ in range(rng.randrange(0, 30))] for _ in range(rng.randint(1, 3))]
            begin = cache.join([len(row) for row in rows])
            assert begin == len(model)
            for layer in range(2):
                for index, row in enumerate(rows):
                    if row:
                        cache.fill(layer, *states([row]), [begin + index])
            model += rows
        elif action < 0.45:
            index = rng.randrange(len(model))
            cache.remove(index)
            model[index] = model[-1]
            model.pop()
        else:
            tokens = [next(fresh) for _ in model]
            cache.open_column()
            for layer in range(2):
                cache.update(*states([[token] for token in tokens]), layer)
            cache.close_column()
            for row, token in zip(model, tokens, strict=True):
                row.append(token)
        assert cache.lengths() == [len(row) for row in model]
        assert cache.width == max(map(len, model), default=0)
        for index, row in enumerate(model):
            assert all(seen(cache, layer, index) == row for layer in range(2))


def test_padding_is_zero_even_where_old_rows_stood():
    cache = RowCache()
    cache.join([3])
    cache.fill(0, *states([[7, 8, 9]]), [0])
    cache.join([1])
    cache.fill(0, *states([[5]]), [1])
    cache.open_column()
    new = torch.ones(2, HEADS, 1, SIZE)
    keys, _ = cache.update(new, new, 0)
    assert keys[1, 0, :, 0].tolist() == [0, 0, 5, 1]
    assert torch.isfinite(keys).all()


def test_clearing_forgets_everything():
    cache = RowCache()
    cache.join([2])
    cache.fill(0, *states([[1, 2]]), [0])
    cache.clear()
    assert (cache.rows, cache.width) == (0, 0)
    cache.join([1])
    cache.fill(0, *states([[3]]), [0])
    assert seen(cache, 0, 0) == [3]


def states_of(tokens, number):
    return lambda: [(torch.full((1, tokens, 1), float(number)), torch.zeros(1, tokens, 1))]


def number_of(found):
    return int(found[0][0][0, 0, 0].item())


def test_the_longest_common_beginning_is_found():
    store = PrefixStore(100)
    store.put(tuple(range(20)), states_of(20, 1))
    store.put((*range(12), 99), states_of(13, 2))
    for prompt, length, number in (
        ((*range(15), 7), 15, 1),
        ((*range(12), 99, 98), 13, 2),
        (tuple(range(9)), 9, 1),
        (tuple(range(4)), 4, 1),
    ):
        found, states = store.find(prompt)
        assert (found, number_of(states), states[0][0].shape[1]) == (length, number, length)
    assert store.find((*range(7), 50, 51)) == store.find((50,)) == store.find(()) == (0, [])
    assert store.tokens == 33


def test_what_was_not_used_for_the_longest_time_makes_room():
    store = PrefixStore(5)
    store.put((1, 1), states_of(2, 1))
    store.put((2, 2), states_of(2, 2))
    assert store.find((1, 1))[0] == 2
    store.put((3, 3), states_of(2, 3))
    assert store.tokens == 4
    assert store.find((2, 2)) == (0, [])
    assert store.find((1, 1))[0] == store.find((3, 3))[0] == 2


def test_a_text_replaces_its_beginnings_and_needs_no_second_copy():
    store = PrefixStore(50)
    store.put((1, 2), states_of(2, 1))
    store.put((1, 2, 3), states_of(3, 2))
    assert store.tokens == 3
    store.put((1, 2), lambda: pytest.fail("its states are known"))
    store.put((1, 2, 3), lambda: pytest.fail("its states are known"))
    assert number_of(store.find((1, 2))[1]) == 2


def test_what_is_too_long_is_not_kept_and_clearing_forgets():
    store = PrefixStore(3)
    store.put((1, 2, 3, 4), lambda: pytest.fail("it would not be kept"))
    store.put((), states_of(0, 1))
    assert store.tokens == 0
    store.put((1, 2), states_of(2, 1))
    store.clear()
    assert (store.tokens, store.find((1, 2))) == (0, (0, []))


@pytest.mark.parametrize(("kind", "apart"), [(torch.float32, 1e-6), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("key_heads", [1, 3, 9])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_rows_is_that_of_sdpa(kind, apart, key_heads, masked):
    rows, tokens, size = 5, 40, 16
    torch.manual_seed(0)
    query = torch.randn(rows, 1, 9, size).transpose(1, 2).to(kind)
    keys, values = torch.randn(2, rows, key_heads, tokens + 20, size).to(kind)[..., 10:-10, :]
    mask = torch.arange(tokens, 0, -1) <= torch.randint(1, tokens, (rows, 1)) if masked else None
    mask = mask[:, None, None] if mask is not None else None
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), attn_mask=mask, scale=0.3, enable_gqa=True
    )
    found, _ = rows_attention(None, query, keys, values, mask, scaling=0.3)
    assert (found.dtype, found.shape) == (kind, (rows, 1, 9, size))
    assert float((found.transpose(1, 2) - expected).abs().max()) < apart
