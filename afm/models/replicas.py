"""Several servers of one model: the least busy is asked, in turn among equals; one that failed rests a while."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

REST_S = 10.0
"""How long a server that failed is asked after all others."""


@dataclass(slots=True)
class Replica:
    """One server.

    Attributes:
        in_flight: Requests that wait for its answer.
    """

    url: str
    in_flight: int = 0
    failed_at: float = float("-inf")

    @property
    def resting(self) -> bool:
        """Whether it failed lately."""
        return time.monotonic() - self.failed_at < REST_S

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While it is asked; every error but a cancellation makes it rest."""
        self.in_flight += 1
        try:
            yield
        except Exception:
            self.failed_at = time.monotonic()
            raise
        finally:
            self.in_flight -= 1
        self.failed_at = float("-inf")


class Replicas:
    """The servers of one model.

    Args:
        urls: Their addresses, at least one.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._all = [Replica(url) for url in urls]
        self._turn = itertools.count()

    def __len__(self) -> int:
        return len(self._all)

    def next(self) -> Replica:
        """The one to ask now."""
        turn = next(self._turn) % len(self._all)
        in_turn = self._all[turn:] + self._all[:turn]
        return min(in_turn, key=lambda replica: (replica.resting, replica.in_flight))


def addresses(text: str) -> tuple[str, ...]:
    """The addresses in ``http://a:8000,http://b:8000``."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
