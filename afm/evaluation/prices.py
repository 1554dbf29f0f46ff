"""What episodes cost in US dollars, by prices that a person gives."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, field_validator
from yaml import YAMLError

from afm.configuration import Settings, parse_yaml, read_file, validated
from afm.endpoints.budget import MAX_USD, MILLION, CachedTokenPrice
from afm.errors import ConfigError, UsageError, suggestion
from afm.evaluation.statistics import Interval, bootstrap_quotient
from afm.trajectory.record import CallRecord, Cost, Record

_BLOCKS = 1024
_EXACT = 10**12
"""Parts of a dollar that are added up as whole numbers, so that the order of episodes does not matter."""


class Prices(CachedTokenPrice):
    """US dollars for a million tokens, and for a call of a tool.

    Attributes:
        prompt: For what a generation reads. Each generation of an episode reads everything before it again.
        completion: For what the model writes.
        cached: For what an earlier generation of the episode has read or written, at an endpoint that keeps prompts in a
            cache; as ``prompt`` when ``None``.
        judge: For the reward's judge; by default ``rewards.judge.price_per_million_tokens``, else it is not counted.
        tools: For one call that was made, by the tool's name; others cost nothing.
    """

    judge: float | None = Field(default=None, ge=0, le=MAX_USD)
    tools: dict[str, float] = Field(default_factory=dict)

    @field_validator("tools")
    @classmethod
    def _within_bounds(cls, value: dict[str, float]) -> dict[str, float]:
        if wrong := [name for name, price in value.items() if not 0 <= price <= MAX_USD]:
            raise ValueError(f"prices of 0 to {MAX_USD:g}, not that of {', '.join(wrong)}")
        return value

    def checked(self, tools: Iterable[str]) -> Prices:
        """These prices, once every tool they name is one of ``tools``.

        Raises:
            ConfigError: One is not, so that its calls would be counted as free.
        """
        known = sorted(tools)
        for name in self.tools:
            if name not in known:
                raise ConfigError(
                    f"prices.tools.{name}: the agent calls no such tool; {suggestion(name, known)}"
                )
        return self

    def model_usd(self, cost: Cost) -> float:
        """Price of an episode's tokens, or of its models at their own prices. Without a record of reads each token counts once."""
        if cost.model_usd is not None:
            return cost.model_usd
        fresh = cost.prompt_tokens + cost.observation_tokens
        read = cost.read_tokens or fresh
        return self.usd(read, cost.agent_tokens, max(0, read - fresh))

    def tools_usd(self, calls: Iterable[CallRecord]) -> float:
        """Of calls; one that repeats an answered one was not made."""
        return sum(self.tools.get(call.tool, 0.0) for call in calls if not call.duplicate)

    def judge_usd(self, tokens: int) -> float:
        """Of the judge's tokens, 0 where its price is not known."""
        return tokens * (self.judge or 0.0) / MILLION


class UsdPerSolved(Settings):
    """Dollars of all episodes over the number that passed, with a 95 % interval that may have no upper end."""

    value: float
    low: float
    high: float | None


class Usd(Settings):
    """What episodes cost in US dollars."""

    per_episode: Interval
    """Mean with its 95 % bootstrap interval over questions."""
    per_solved: UsdPerSolved | None
    """Cost of a solved task, failed episodes included; ``None`` when none passed."""
    parts: dict[str, float]
    """Means of an episode, by what was paid: ``model``, ``tools``, ``judge``."""
    judge_unpriced: bool = False
    """Whether a judge was asked whose price is not known; it is then left out."""


class Spending:
    """Adds up the money of episodes; their order does not matter.

    Questions are kept in up to 1,024 blocks, by a hash of their id: what the bootstrap resamples, and all that is
    held in memory.
    """

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self._blocks: dict[int, list[int]] = {}
        self._parts = {"model": 0, "tools": 0, "judge": 0}
        self._judge_unpriced = False

    def add(self, task: str, record: Record, *, passed: bool) -> None:
        """Count one episode that infrastructure did not end."""
        tokens = record.verdict.judge_tokens if record.verdict else 0
        self._judge_unpriced |= tokens > 0 and self._prices.judge is None
        parts = {
            "model": self._prices.model_usd(record.cost),
            "tools": self._prices.tools_usd(record.calls),
            "judge": self._prices.judge_usd(tokens),
        }
        block = self._blocks.setdefault(
            zlib.crc32(task.encode("utf-8", "surrogatepass")) % _BLOCKS, [0, 0, 0]
        )
        for name, usd in parts.items():
            whole = round(usd * _EXACT)
            self._parts[name] += whole
            block[0] += whole
        block[1] += 1
        block[2] += passed

    def usd(self, *, seed: int = 0) -> Usd | None:
        """The figures so far, ``None`` without an episode. ``seed`` is the bootstrap's."""
        if not self._blocks:
            return None
        rows = [row for _, row in sorted(self._blocks.items())]
        spent = [row[0] / _EXACT for row in rows]
        episodes, solved = [row[1] for row in rows], [row[2] for row in rows]
        value, low, high = bootstrap_quotient([spent], [episodes], seed=seed)
        mean = Interval(value=value, low=low, high=value if high is None else high)
        per_solved = None
        if sum(solved):
            value, low, high = bootstrap_quotient([spent], [solved], seed=seed)
            per_solved = UsdPerSolved(value=value, low=low, high=high)
        parts = {name: total / _EXACT / sum(episodes) for name, total in self._parts.items()}
        return Usd(per_episode=mean, per_solved=per_solved, parts=parts, judge_unpriced=self._judge_unpriced)


def read_prices(text: str) -> Prices:
    """Prices from the command line: a YAML file with ``prices``, such as an evaluation's, or the mapping itself.

    Raises:
        ConfigError: The file cannot be read or has no prices.
        UsageError: A key or value is wrong.
    """
    if text.lstrip().startswith("{"):
        try:
            label, data = "--prices", parse_yaml(text)
        except YAMLError as error:
            raise UsageError(f"--prices: {text!r} is no YAML: {error}") from None
    else:
        label, data = text, read_file(Path(text), "prices")
        if isinstance(data.get("prices"), dict):
            data = data["prices"]
        elif "prices" in data or "data" in data:
            raise ConfigError(f"{text}: has no prices; expected `prices: {{prompt: USD, completion: USD}}`")
    try:
        return validated(Prices, data, label)
    except ConfigError as error:
        raise UsageError(str(error)) from None
