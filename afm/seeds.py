"""Seeds of episodes and generations, derived from the seed of a run."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: object, bits: int = 31) -> int:
    """Return the first ``bits`` bits of the SHA-256 of ``parts``, joined as text by NUL characters.

    Equal parts give equal seeds on every machine. Different parts give independent randomness.

    Args:
        bits: At most 64. Every random number generator in use accepts 31 bits. A JSON number holds 53 bits.
    """
    text = "\0".join(map(str, parts))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) >> (64 - bits)


def episode_seed(run_seed: int, task_id: str, round_number: int) -> int:
    """Return the seed of a task's episode in a round of an evaluation or a selection of questions."""
    return derive_seed(run_seed, task_id, round_number)


def generation_seed(seed: int, index: int) -> int:
    """Return the seed of the ``index``-th generation of an episode: 53 bits of a hash, so that seeds are unrelated."""
    return derive_seed(f"{seed}/{index}", bits=53)
