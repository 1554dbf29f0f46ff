import torch

from afm.models.cache import PrefixStore


def states(number):
    return [(torch.full((1, 1, 1), float(number)), torch.zeros(1, 1, 1))]


def number_of(found):
    return int(found[0][0].item())


def test_the_longest_beginning_is_taken_and_gone():
    store = PrefixStore(100)
    store.put((1, 2), states(12))
    store.put((1, 2, 3), states(123))
    store.put((1, 9, 3), states(193))
    length, found = store.take([1, 2, 3, 4])
    assert (length, number_of(found)) == (3, 123)
    length, found = store.take([1, 2, 3, 4])
    assert (length, number_of(found)) == (2, 12)
    assert store.take([1, 2, 3, 4]) == (0, [])
    assert store.tokens == 3


def test_a_longer_text_is_no_beginning():
    store = PrefixStore(100)
    store.put((1, 2, 3), states(1))
    assert store.take([1, 2]) == (0, [])


def test_the_oldest_make_room():
    store = PrefixStore(5)
    store.put((1, 1), states(1))
    store.put((2, 2), states(2))
    store.put((3, 3), states(3))
    assert store.tokens == 4
    assert store.take([1, 1]) == (0, [])
    assert store.take([2, 2])[0] == 2
    assert store.take([3, 3])[0] == 2
    assert store.tokens == 0


def test_the_same_text_is_kept_once():
    store = PrefixStore(5)
    store.put((1, 1), states(1))
    store.put((1, 1), states(2))
    assert store.tokens == 2
    assert number_of(store.take([1, 1])[1]) == 2
    assert store.take([1, 1]) == (0, [])


def test_what_is_too_long_is_not_kept_and_clearing_forgets():
    store = PrefixStore(3)
    store.put((1, 2, 3, 4), states(1))
    store.put((), states(1))
    assert store.tokens == 0
    store.put((1, 2), states(1))
    store.clear()
    assert (store.tokens, store.take([1, 2])) == (0, (0, []))
