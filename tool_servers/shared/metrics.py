"""Numbers for a monitoring system, in the text format of Prometheus (version 0.0.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Count:
    """A number that only grows, split by the values of one label.

    Args:
        name: Ends in ``_total``.
        label: Name of the label.
        values: Values to show from the beginning, so that a rate can be computed for the first event.
    """

    def __init__(self, name: str, text: str, label: str, values: Sequence[str] = ()) -> None:
        self._name, self._text, self._label = name, text, label
        self._counts = Counter(dict.fromkeys(values, 0))

    def add(self, value: str) -> None:
        """One more of ``value``."""
        self._counts[value] += 1

    def lines(self) -> list[str]:
        """As Prometheus reads it."""
        rows = [f'{self._name}{{{self._label}="{value}"}} {count}' for value, count in self._counts.items()]
        return [f"# HELP {self._name} {self._text}", f"# TYPE {self._name} counter", *rows]


class Gauge:
    """A number that goes up and down, asked for when it is read."""

    def __init__(self, name: str, text: str, now: Callable[[], float]) -> None:
        self._name, self._text, self._now = name, text, now

    def lines(self) -> list[str]:
        """As Prometheus reads it."""
        return [
            f"# HELP {self._name} {self._text}",
            f"# TYPE {self._name} gauge",
            f"{self._name} {self._now():g}",
        ]


class Durations:
    """A histogram of seconds."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """One more duration."""
        place = next((i for i, bound in enumerate(self._bounds) if seconds <= bound), len(self._bounds))
        self._counts[place] += 1
        self._sum += seconds

    def lines(self) -> list[str]:
        """As Prometheus reads it."""
        rows, total = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            rows.append(f'{self._name}_bucket{{le="{bound}"}} {total}')
        rows += [f"{self._name}_sum {self._sum:.6f}", f"{self._name}_count {total}"]
        return [f"# HELP {self._name} {self._text}", f"# TYPE {self._name} histogram", *rows]


def page(metrics: Sequence[Count | Gauge | Durations]) -> str:
    """All of them as one text."""
    return "\n".join(line for metric in metrics for line in metric.lines()) + "\n"
