"""A keyed shuffle of ``0 .. size - 1`` that is computed entry by entry, both ways, in constant memory."""

from __future__ import annotations

import hashlib
import math

_ROUNDS = 4
_MASK = (1 << 64) - 1


class Permutation:
    """A pseudo-random bijection on ``range(size)``.

    A Feistel network over mixed radix (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"): a number is a
    pair of digits, each round adds a hash of one digit to the other; results beyond the domain are sent round again.

    Args:
        size: At least 1.
        key: Different keys give unrelated shuffles.
    """

    __slots__ = ("_keys", "_left", "_right", "size")

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._left = max(1, math.isqrt(size - 1) + 1)
        self._right = -(-size // self._left)
        digest = hashlib.sha256(key.encode()).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "big") for i in range(_ROUNDS)]

    def __call__(self, number: int) -> int:
        """Where ``number`` goes."""
        while True:
            left, right = divmod(number, self._right)
            for place, key in enumerate(self._keys):
                if place % 2:
                    right = (right + _mixed(left ^ key)) % self._right
                else:
                    left = (left + _mixed(right ^ key)) % self._left
            number = left * self._right + right
            if number < self.size:
                return number

    def inverse(self, number: int) -> int:
        """What comes to ``number``."""
        while True:
            left, right = divmod(number, self._right)
            for place in range(_ROUNDS - 1, -1, -1):
                key = self._keys[place]
                if place % 2:
                    right = (right - _mixed(left ^ key)) % self._right
                else:
                    left = (left - _mixed(right ^ key)) % self._left
            number = left * self._right + right
            if number < self.size:
                return number


def _mixed(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
