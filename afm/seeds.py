"""Seeds of episodes and generations, derived from the seed of a run."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: object, bits: int = 31) -> int:
    """The first ``bits`` bits of the SHA-256 of ``parts``, written as text with NUL characters between them.

    Equal parts give equal seeds on every machine; pieces of work with other parts do not share their randomness.

    Args:
        bits: At most 64. 31 fit every random number generator in use; 53 fit a number in JSON.
    """
    text = "\0".join(map(str, parts))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) >> (64 - bits)


def episode_seed(run_seed: int, task_id: str, round_number: int) -> int:
    """Seed of a task's episode in a round of an evaluation or a selection of questions."""
    return derive_seed(run_seed, task_id, round_number)


def generation_seed(seed: int, index: int) -> int:
    """Seed of the ``index``-th generation of an episode: 53 bits of a hash, so that no two are related."""
    return derive_seed(f"{seed}/{index}", bits=53)
