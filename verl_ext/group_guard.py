"""Group statistics of dynamic sampling, and a guard that ends a run that cannot learn.

DAPO (arXiv 2503.14476, section 3.2) drops a group of samples of one prompt when all of them have the same
reward, because its advantages are zero. It generates until the batch is full. verl's V1 trainer sets no
limit, so with a constant reward it generates forever.

:func:`refuse_non_finite` guards the rewards: one NaN in a group makes all its advantages NaN, and then the weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Real
from typing import Any

from afm.errors import AfmError, RewardError
from verl_ext.curriculum import QUESTION

SAMPLER = "pkg://verl_ext.sampler"
"""Value of ``trainer.v1.sampler.custom_sampler.path`` for the sampler that uses this guard."""
ABSTAINED = "abstained"
"""Key of a sample's facts: 1 if its reward abstained, so the sample has no score."""
FAILED = "failed"
"""Key of a sample's facts: the error of a failed episode, else empty. A failed episode has no score either."""
SOURCE = "data_source"
"""Key of a sample's facts: the data source of its question."""
DRIFT = "token_drift"
"""Key of a sample's facts: trained tokens that differ from the sampled ones. Any value above 0 ends the run."""
AGENT = "agent"
"""Key of a sample's facts: its agent. Absent in a run of one agent."""
HARNESS = "harness_"
"""Prefix of the facts that count how the programs of a harness ended. They are counted over all samples, including those
without a score."""
PARTS = ("score", "acc", "correct", "format", "overlong")
"""Facts that are also averaged per data source."""
AGENT_PARTS = (*PARTS, "tool_calls", "tool_failures", "agent_tokens", "response_tokens", "cut_short")
"""Facts that are also averaged per agent."""


class GroupsAlikeError(AfmError, RuntimeError):
    """Raised when too many batches were generated without a full batch of groups with different rewards."""


class EpisodesFailedError(AfmError, RuntimeError):
    """Raised when more episodes failed than a run may lose."""


class ShortBatch(StrEnum):
    """What to do if the allowed generation did not fill a training batch."""

    STOP = "stop"
    """End the run with the reason."""
    FILL = "fill"
    """Fill the batch with groups of equal rewards. Their advantages are zero, so they only cost time. The run
    ends only at a step without any group to learn from. If most groups are solved, it ends only after four times the limit."""


_PATIENCE = 4
"""A step that may be filled up generates this many times its limit, while it has no group to learn from and most groups
are solved."""


class GroupFate(StrEnum):
    """The fate of the samples of one prompt."""

    KEPT = "kept"
    ALIKE = "alike"
    """All samples have the same metric, so there is nothing to learn."""
    VOID = "void"
    """Too few samples have a score for a comparison."""


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """The samples of one prompt. Each is a mapping of facts (reward parts, counts, ``abstained``)."""

    samples: Sequence[Mapping[str, Any]]

    @property
    def scored(self) -> list[Mapping[str, Any]]:
        """The samples whose reward did not abstain."""
        return [sample for sample in self.samples if not sample.get(ABSTAINED)]

    @property
    def agent_tokens(self) -> float:
        """Number of tokens that the agent wrote."""
        return sum(float(sample.get("agent_tokens", 0)) for sample in self.samples)

    def fate(self, metric: str | None, expected: int) -> GroupFate:
        """Return whether the group is kept or dropped.

        Args:
            metric: The fact that must differ. ``None`` keeps every group with enough scores.
            expected: Requested samples per prompt. With one sample there is nothing to compare.

        Raises:
            KeyError: A scored sample lacks ``metric``.
        """
        scored = self.scored
        if len(scored) < min(2, expected):
            return GroupFate.VOID
        if metric is None or expected < 2:
            return GroupFate.KEPT
        values = {float(sample[metric]) for sample in scored}
        return GroupFate.KEPT if len(values) > 1 else GroupFate.ALIKE


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished group, its fate, and the reason why a sample has no score."""

    fate: GroupFate
    group: SampleGroup
    evidence: str = ""


@dataclass(slots=True)
class GroupLedger:
    """Counts the groups of one training step, and ends a step that cannot fill its batch.

    Args:
        metric: The fact that group filtering compares, ``None`` without filtering.
        batch_groups: Groups of a full training batch.
        expected: Samples per prompt.
        max_gen_batches: Generated batches after which an unfilled training batch ends the run. 0 or less
            means no limit (as in verl's ``algorithm.filter_groups.max_num_gen_batches``).
        short_batch: What to do with an unfilled batch.
    """

    metric: str | None
    batch_groups: int
    expected: int
    max_gen_batches: int = 0
    short_batch: ShortBatch = ShortBatch.STOP
    step: int = 0
    entries: dict[str, Entry] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    settled: frozenset[str] = frozenset()
    filled: int = 0

    def start(self, step: int) -> None:
        """Forget the groups of the previous step, except those that wait for training or finished after that step."""
        self.step = step
        self.entries = {uid: entry for uid, entry in self.entries.items() if uid not in self.settled}
        self.trained = self.waiting = self.settled = frozenset()
        self.filled = 0

    def add(self, uid: str, group: SampleGroup, evidence: str = "") -> GroupFate:
        """Record a finished group and return its fate. ``evidence`` is the reason why a sample has no score."""
        fate = group.fate(self.metric, self.expected)
        self.entries[uid] = Entry(fate, group, evidence)
        return fate

    def settle(self, trained: Iterable[str], waiting: Iterable[str]) -> None:
        """End a step with the groups that it trains on and those that wait for a later step."""
        self.trained = frozenset(trained)
        self.waiting = frozenset(waiting) - self.trained
        self.settled = frozenset(self.entries) - self.waiting

    @property
    def ended(self) -> list[Entry]:
        """The groups of this step, without those that wait for a later one."""
        return [*self._counted.values()]

    @property
    def fates(self) -> Counter[GroupFate]:
        """Number of groups by fate."""
        return Counter(entry.fate for entry in self.ended)

    @property
    def alike(self) -> Counter[float]:
        """Number of groups without a signal, by the metric value that all their samples have."""
        metric = self.metric
        groups = [entry.group for entry in self._counted.values() if entry.fate is GroupFate.ALIKE]
        return Counter(float(group.scored[0][metric]) for group in groups) if metric else Counter()

    @property
    def evidence(self) -> str:
        """The first reason why a sample has no score."""
        return next((entry.evidence for entry in self._counted.values() if entry.evidence), "")

    @property
    def _counted(self) -> dict[str, Entry]:
        return {uid: entry for uid, entry in self.entries.items() if uid not in self.waiting}

    @property
    def generated(self) -> int:
        """Number of groups of this step."""
        return self.fates.total()

    @property
    def exhausted(self) -> bool:
        """Whether the allowed generation is used up and did not yield a full batch of groups to learn from."""
        if self.max_gen_batches <= 0 or self.fates[GroupFate.KEPT] >= self.batch_groups:
            return False
        limit = self.max_gen_batches * self.batch_groups
        return self.generated >= (limit * _PATIENCE if self._is_solved else limit)

    @property
    def _is_solved(self) -> bool:
        """Whether the step may be filled up, but has no group to learn from, and most groups are solved."""
        solved = sum(count for value, count in self.alike.items() if value > 0)
        may_wait = self.short_batch is ShortBatch.FILL and not self.fates[GroupFate.KEPT]
        return may_wait and 2 * solved > self.generated

    def check(self) -> None:
        """End an exhausted step, unless it may be filled up.

        Raises:
            GroupsAlikeError: The step is exhausted and may not be filled up.
        """
        fillable = self.short_batch is ShortBatch.FILL and self.fates[GroupFate.KEPT] > 0
        if self.exhausted and not fillable:
            raise GroupsAlikeError(self._complaint())

    def _complaint(self) -> str:
        fates = self.fates
        lines = [
            f"step {self.step}: {self.generated} groups of {self.expected} samples were generated "
            f"({self.generated / self.batch_groups:g} training batches), but only {fates[GroupFate.KEPT]} of the "
            f"{self.batch_groups} groups of a step can be trained on."
        ]
        if self.alike:
            values = ", ".join(f"{count} x {value:g}" for value, count in self.alike.most_common(3))
            lines.append(
                f"In {fates[GroupFate.ALIKE]} groups, all samples have the same {self.metric!r} ({values})."
            )
        if fates[GroupFate.VOID]:
            lines.append(
                f"In {fates[GroupFate.VOID]} groups, the reward abstained: {self.evidence or 'no reason given'}."
            )
        return " ".join([*lines, self._advice()])

    def _advice(self) -> str:
        if self.fates[GroupFate.VOID] > self.fates[GroupFate.ALIKE]:
            return "Repair the data or the verifier first."
        common = self.alike.most_common(1)
        if common and common[0][0] > 0:
            how = "raise" if self.short_batch is ShortBatch.FILL else "set short_batch=fill, raise"
            return (
                "The prompts are too easy: use harder ones, or stop here. To continue anyway, "
                f"{how} algorithm.filter_groups.max_num_gen_batches, or set "
                "algorithm.filter_groups.enable=false."
            )
        return (
            "The prompts are too hard, or the reward cannot be earned: check it on a few responses with "
            "`afm reward`, train longer before RL, raise the temperature or the samples per prompt, or "
            "use easier prompts."
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this step: groups by fate, and means over every scored sample, including dropped groups."""
        entries, fates = self._counted, self.fates
        samples = [sample for entry in entries.values() for sample in entry.group.scored]
        facts: dict[str, float] = {"groups/generated": float(fates.total())}
        for fate in GroupFate:
            facts[f"groups/{fate.value}"] = float(fates[fate])
        for value, count in self.alike.items():
            side = "groups/alike_solved" if value > 0 else "groups/alike_failed"
            facts[side] = facts.get(side, 0.0) + count
        facts["groups/fillers"] = float(self.filled)
        kept = {uid for uid, entry in entries.items() if entry.fate is GroupFate.KEPT}
        facts["groups/surplus"] = float(len(kept - self.trained))
        total = sum(len(entry.group.samples) for entry in entries.values())
        failed = sum(bool(sample.get(FAILED)) for entry in entries.values() for sample in entry.group.samples)
        facts["groups/failed_samples"] = float(failed)
        facts["groups/abstained_samples"] = float(total - len(samples) - failed)
        facts |= self._tokens(entries) | _means_of(samples) | _kept_by_agent(entries.values())
        return facts | _counts_of_programs(entries.values())

    def _tokens(self, entries: Mapping[str, Entry]) -> dict[str, float]:
        """Return the number of the agent's tokens, and the share of them in groups that are not trained on."""
        tokens = {uid: entry.group.agent_tokens for uid, entry in entries.items()}
        total = sum(tokens.values())
        used = sum(count for uid, count in tokens.items() if uid in self.trained)
        return {"groups/agent_tokens": total, "groups/unused_share": 1 - used / total if total else 0.0}


def _kept_by_agent(entries: Iterable[Entry]) -> dict[str, float]:
    """Return the number of groups of each agent, and of those that can be trained on."""
    counts: Counter[str] = Counter()
    for entry in entries:
        agent = next((sample[AGENT] for sample in entry.group.samples if sample.get(AGENT)), None)
        if agent is not None:
            counts[f"agent/{agent}/groups"] += 1
            counts[f"agent/{agent}/groups_kept"] += entry.fate is GroupFate.KEPT
    return {key: float(count) for key, count in counts.items()}


def _counts_of_programs(entries: Iterable[Entry]) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for entry in entries:
        for sample in entry.group.samples:
            counts.update({key: value for key, value in sample.items() if key.startswith(HARNESS)})
    return {f"harness/{key.removeprefix(HARNESS)}": float(count) for key, count in counts.items()}


def _means_of(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    means: dict[str, float] = {}
    for key in sorted({key for sample in samples for key in sample} - _WORDS):
        if key.startswith(HARNESS):
            continue
        means[f"rollout/{key}"] = _mean(samples, key)
    seconds = [float(sample["seconds"]) for sample in samples if "seconds" in sample]
    if seconds:
        means["rollout/slowest_seconds"] = max(seconds)
    means |= _means_by(SOURCE, "source", PARTS, samples) | _means_by(AGENT, "agent", AGENT_PARTS, samples)
    return means


_WORDS = {ABSTAINED, FAILED, SOURCE, QUESTION, AGENT}
"""Keys of facts without a mean."""


def _means_by(
    kind: str, begin: str, parts: Sequence[str], samples: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    means: dict[str, float] = {}
    for name in sorted({str(sample[kind]) for sample in samples if sample.get(kind)}):
        part_of = [sample for sample in samples if sample.get(kind) == name]
        known = {key for sample in part_of for key in sample}
        means |= {f"{begin}/{name}/{key}": _mean(part_of, key) for key in parts if key in known}
    return means


def _mean(samples: Sequence[Mapping[str, Any]], key: str) -> float:
    values = [float(sample[key]) for sample in samples if sample.get(key) is not None]
    return sum(values) / len(values)


def refuse_non_finite(facts: Mapping[str, Any], *, data_source: str, episode: str) -> None:
    """Reject rewards that are not finite numbers.

    Args:
        facts: Parts of a reward and their combination, by name. Values that are not numbers are ignored.
        data_source: Data source of the question.
        episode: Name of the episode, as in the logs and the kept episodes.

    Raises:
        RewardError: A value is NaN or infinite. The message lists all of them.
    """
    wrong = {
        name: value for name, value in facts.items() if isinstance(value, Real) and not math.isfinite(value)
    }
    if wrong:
        listed = ", ".join(f"{name} = {float(value):g}" for name, value in wrong.items())
        raise RewardError(
            f"the reward of episode {episode} (data_source {data_source!r}) is not finite: {listed}; expected finite numbers. "
            "Repair the scorer of this data_source, or let it abstain (a score of None), which leaves the sample out"
        )


def without_advantage(queue: Any, batch: Any, prompts: Set[str]) -> Any:
    """Set the advantages of all samples of ``prompts`` to zero in verl's transfer queue, and return the updated batch."""
    import torch
    from tensordict import TensorDict

    data = queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages"])
    rows = zip(batch.keys, data["advantages"].unbind(), strict=True)
    values = [value * (key.split("_")[0] not in prompts) for key, value in rows]
    nested = torch.nested.as_nested_tensor(values, layout=torch.jagged)
    output = TensorDict({"advantages": nested, "returns": nested}, batch_size=len(batch))
    return queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=output)


def spread(padding: Sequence[bool], workers: int) -> list[int]:
    """Return an order of rows in which padding is spread evenly over the rows of each worker.

    Args:
        padding: Whether each row is padding. Each worker has an equal number of consecutive rows.
    """
    size = len(padding) // workers
    order: list[int] = []
    for begin in range(0, len(padding), size):
        kinds: tuple[list[int], list[int]] = ([], [])
        for row in range(begin, begin + size):
            kinds[padding[row]].append(row)
        places = [((at + 0.5) / len(rows), row) for rows in kinds for at, row in enumerate(rows)]
        order += [row for _, row in sorted(places)]
    return order
