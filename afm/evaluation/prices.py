"""The cost of episodes in US dollars, from given prices."""

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
"""Parts of a dollar. They are added as whole numbers, so that the order of episodes does not matter."""


class Prices(CachedTokenPrice):
    """Prices in US dollars per million tokens and per tool call.

    Attributes:
        prompt: Tokens that a generation reads. Each generation of an episode reads everything before it again.
        completion: Tokens that the model writes.
        cached: Tokens that an earlier generation of the episode has read or written, at an endpoint that caches
            prompts. ``None`` means the price of ``prompt``.
        judge: Tokens of the judge. The default is ``rewards.judge.price_per_million_tokens``. Without either it is not
            counted.
        tools: Calls by name of the tool. Other tools cost nothing.
    """

    judge: float | None = Field(default=None, ge=0, le=MAX_USD)
    tools: dict[str, float] = Field(default_factory=dict)

    @field_validator("tools")
    @classmethod
    def _within_bounds(cls, value: dict[str, float]) -> dict[str, float]:
        if wrong := [name for name, price in value.items() if not 0 <= price <= MAX_USD]:
            raise ValueError(f"prices from 0 to {MAX_USD:g}; wrong: {', '.join(wrong)}")
        return value

    def checked(self, tools: Iterable[str]) -> Prices:
        """Return these prices after a check that every priced tool is one of ``tools``.

        Raises:
            ConfigError: A priced tool is not. A misspelt name would make calls free.
        """
        known = sorted(tools)
        for name in self.tools:
            if name not in known:
                raise ConfigError(
                    f"prices.tools.{name}: the agent calls no such tool; {suggestion(name, known)}"
                )
        return self

    def model_usd(self, cost: Cost) -> float:
        """Return the price of an episode's tokens, or the cost in its record. Without a record of reads each token counts once."""
        if cost.model_usd is not None:
            return cost.model_usd
        fresh = cost.prompt_tokens + cost.observation_tokens
        read = cost.read_tokens or fresh
        return self.usd(read, cost.agent_tokens, max(0, read - fresh))

    def tools_usd(self, calls: Iterable[CallRecord]) -> float:
        """Return the price of calls. A call that repeats an answered call was not made and is free."""
        return sum(self.tools.get(call.tool, 0.0) for call in calls if not call.duplicate)

    def judge_usd(self, tokens: int) -> float:
        """Return the price of the judge's tokens, 0 without a known price."""
        return tokens * (self.judge or 0.0) / MILLION


class UsdPerSolved(Settings):
    """Dollars of all episodes divided by the number that passed, with a 95 % interval. It may have no upper end."""

    value: float
    low: float
    high: float | None


class Usd(Settings):
    """Cost of episodes in US dollars."""

    per_episode: Interval
    """Mean with its 95 % bootstrap interval over questions."""
    per_solved: UsdPerSolved | None
    """Cost per solved task, with the failed episodes included. ``None`` if none passed."""
    parts: dict[str, float]
    """Means per episode of ``model``, ``tools`` and ``judge``."""
    judge_unpriced: bool = False
    """Whether a judge without a known price was asked. Its cost is left out."""


class Spending:
    """Adds up the cost of episodes. Their order does not matter.

    Questions are kept in up to 1,024 blocks by a hash of their id. The bootstrap resamples these blocks, and nothing
    else is held in memory.
    """

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self._blocks: dict[int, list[int]] = {}
        self._parts = {"model": 0, "tools": 0, "judge": 0}
        self._judge_unpriced = False

    def add(self, task: str, record: Record, *, passed: bool) -> None:
        """Count one episode that ended without an error."""
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
        """Return the figures so far, ``None`` without an episode. ``seed`` is for the bootstrap."""
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
    """Read prices from the command line: a YAML file with ``prices``, such as that of an evaluation, or the mapping itself.

    Raises:
        ConfigError: The file cannot be read or has no prices.
        UsageError: A key or value is wrong.
    """
    if text.lstrip().startswith("{"):
        try:
            label, data = "--prices", parse_yaml(text)
        except YAMLError as error:
            raise UsageError(f"--prices: {text!r} is not YAML: {error}") from None
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
