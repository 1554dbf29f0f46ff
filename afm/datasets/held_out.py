"""Questions held out of training, chosen by the hash of their text while they stream by."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator

from afm.datasets.schema import Task

_LARGEST_SHARE = 10
"""One question in so many is held out at most."""


class HeldOut:
    """Takes questions out of a stream; memory holds those alone.

    The questions with the smallest hashes are taken: whatever the order of the rows, the same ones. Rows with one text are
    one question.

    Args:
        count: Questions to take, at most a tenth of all, and at least one.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self._groups: dict[int, list[Task]] = {}
        self._largest: list[int] = []

    @property
    def tasks(self) -> list[Task]:
        """What was taken, in the order of the hashes."""
        return [task for key in sorted(self._groups) for task in self._groups[key]]

    def split(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """Yield what stays; :attr:`tasks` is complete when this has ended."""
        seen = 0
        for task in tasks:
            seen += 1
            key = self._key(task)
            if key in self._groups:
                self._groups[key].append(task)
                continue
            if len(self._groups) == self._count and key > -self._largest[0]:
                yield task
                continue
            self._groups[key] = [task]
            heapq.heappush(self._largest, -key)
            yield from self._returned(self._count)
        yield from self._returned(max(1, seen // _LARGEST_SHARE) if seen > 1 else 0)

    def _returned(self, most: int) -> Iterator[Task]:
        """Give back the largest until ``most`` are left; rows of one text go together, so nothing is in both parts."""
        while len(self._groups) > most:
            yield from self._groups.pop(-heapq.heappop(self._largest))

    def _key(self, task: Task) -> int:
        text = f"{self._seed}\n{' '.join(task.question.split())}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
