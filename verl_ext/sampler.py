"""verl's replay buffer with our guard: bounded dynamic sampling, failures that end the run, statistics.

``trainer.v1.sampler.custom_sampler.{path,name}=pkg://verl_ext.sampler,sampler_for`` selects it. Its options are in
``trainer.v1.sampler.sampler_kwargs`` (:class:`SamplerOptions`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from afm.errors import AfmError, ConfigError, EngineError, RewardError, suggestion
from afm.terminal import plural
from verl_ext.curriculum import QUESTION, SOLVED, running
from verl_ext.failures import FAILURES_FILE, first_failure, write_verdict
from verl_ext.group_guard import (
    ABSTAINED,
    DRIFT,
    FAILED,
    PARTS,
    SOURCE,
    EpisodesFailedError,
    GroupFate,
    GroupLedger,
    SampleGroup,
    ShortBatch,
    refuse_non_finite,
)

TRAIN = "train"


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """Options that verl does not pass to a custom sampler.

    Attributes:
        filter_groups: ``algorithm.filter_groups``, including ``max_num_gen_batches``.
        train_batch_size: Prompts per training batch.
        gen_batch_size: Prompts fetched at once. verl forces 1 with group filtering.
        samples_per_prompt: ``actor_rollout_ref.rollout.n``.
        output_dir: Folder of the recorded failures and of the reason of an intended end.
        short_batch: What to do if ``max_num_gen_batches`` did not fill a training batch.
        max_failed_episodes: Episodes of a step or a validation that may fail, ``None`` for 1 %, at least 1.
        poll_interval_s: Seconds between two looks for finished rollouts (verl: 2 s).
    """

    filter_groups: Mapping[str, Any]
    train_batch_size: int
    samples_per_prompt: int
    gen_batch_size: int | None = None
    output_dir: str | None = None
    short_batch: str = ShortBatch.STOP
    max_failed_episodes: int | None = None
    poll_interval_s: float = 0.5

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> SamplerOptions:
        """Read the options from ``sampler_kwargs``.

        Raises:
            ConfigError: An option is unknown or missing.
        """
        known = [field.name for field in fields(cls)]
        for key in options:
            if key not in known:
                raise ConfigError(f"trainer.v1.sampler.sampler_kwargs.{key}: {suggestion(key, known)}")
        try:
            return cls(**options)
        except TypeError as error:
            raise ConfigError(f"trainer.v1.sampler.sampler_kwargs: {error}") from None

    @property
    def metric(self) -> str | None:
        """The fact by which groups are compared, ``None`` without group filtering."""
        return str(self.filter_groups["metric"]) if self.filter_groups.get("enable") else None


def sampler_for(*, trainer_mode: str, sampler_kwargs: Mapping[str, Any], **arguments: Any) -> ReplayBuffer:
    """Make the sampler of a trainer mode. verl passes the arguments of its own sampler."""
    options = SamplerOptions.read(sampler_kwargs)
    common: dict[str, Any] = dict(
        trainer_mode=trainer_mode,
        sampler_kwargs=sampler_kwargs,
        poll_interval=options.poll_interval_s,
        filter_groups_metric=options.metric,
        **arguments,
    )
    if trainer_mode != "sync":
        return GuardedAsyncBuffer(options, **common)
    return GuardedBuffer(
        options,
        train_batch_size=options.train_batch_size,
        gen_batch_size=1 if options.metric else options.gen_batch_size or options.train_batch_size,
        max_inflight_gen_batches=options.filter_groups.get("max_inflight_gen_batches", 1),
        **common,
    )


class _Guarded(ReplayBuffer):
    """Additions of both samplers to verl's."""

    def __init__(self, options: SamplerOptions, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._options = options
        self._ledger = GroupLedger(
            metric=options.metric,
            batch_groups=options.train_batch_size,
            expected=options.samples_per_prompt,
            max_gen_batches=int(options.filter_groups.get("max_num_gen_batches", 0)),
            short_batch=ShortBatch(options.short_batch),
        )
        # The fate of each finished group, and the keys of samples that are not trained on.
        self._fates: dict[str, GroupFate] = {}
        self._alike: dict[str, float] = {}
        self._fillers: set[str] = set()
        self._unscored: set[str] = set()
        self._evidence: dict[str, str] = {}
        # Episodes since the last batch, and the errors of the failed ones.
        self._episodes = 0
        self._failed: list[str] = []

    @property
    def fillers(self) -> Set[str]:
        """The prompts that fill up the batch that was returned last. Nothing is to be learned from them."""
        return self._fillers

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Return a batch and, for training, the metrics of its sampling.

        Raises:
            GroupsAlikeError: Dynamic sampling used up its limit without a full batch.
            EngineError: The engine failed.
            EpisodesFailedError: More episodes failed than are allowed.
        """
        if partition_id == TRAIN:
            self._ledger.start(global_steps)
            self._fillers.clear()
        with self._telling():
            batch, metrics = super().sample(global_steps, partition_id, batch_size)
        if partition_id != TRAIN:
            return batch, metrics
        # A key is UID_SAMPLE_OUTPUT. The uid identifies the prompt, and so the group.
        trained = {key.split("_")[0] for key in batch.keys}
        self._ledger.filled = len(self._fillers & trained)
        self._ledger.settle(trained, self._waiting(trained))
        self._failed.clear()
        self._episodes = 0
        if curriculum := running():
            # Not before: a group that waits for a later step is judged again after a resume.
            for scored in filter(None, (entry.group.scored for entry in self._ledger.ended)):
                curriculum.record(scored[0][QUESTION], fmean(float(sample[SOLVED]) for sample in scored))
        return batch, metrics | self._ledger.metrics() | (curriculum.metrics() if curriculum else {})

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Write the reason of an intended end for the launcher."""
        try:
            yield
        except AfmError as error:
            write_verdict(self._options.output_dir, error)
            raise

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        failed = sorted(uid for uids in self.failure_keys.values() for uid in uids)
        if failed:
            reason = first_failure(self._options.output_dir) or "see 'Error in _run_prompt' in the log"
            raise EngineError(f"{plural(len(failed), 'prompt')} could not be rolled out: {reason}")

    def _dapo_filtered_keys(self, partition_id: str) -> tuple[set[str], Counter[float]]:
        if partition_id != TRAIN:
            return set(), Counter()
        finished = self.finished_keys[partition_id]
        self._forget_all_but(finished)
        new = finished - self._fates.keys()
        if new:
            for uid, group in self._groups(partition_id, new).items():
                self._judge(uid, group)
            self._ledger.check()
        # Groups are judged even without filtering, to count failures and drift and to find samples without a score.
        if self.filter_groups_metric is None:
            return set(), Counter()
        self._fill(finished)
        dropped = {uid for uid in finished if self._fates[uid] is not GroupFate.KEPT} - self._fillers
        return dropped, Counter(self._alike[uid] for uid in dropped if uid in self._alike)

    def _fill(self, finished: set[str]) -> None:
        """Keep as many groups without a signal as an exhausted step still needs."""
        if not self._ledger.exhausted:
            return
        usable = sum(self._fates[uid] is GroupFate.KEPT for uid in finished) + len(self._fillers)
        spare = [uid for uid in finished if uid in self._alike and uid not in self._fillers]
        taken = spare[: max(0, self._options.train_batch_size - usable)]
        self._fillers.update(taken)

    def _select_prompt_uids(self, partition_id: str, sampleable_keys: set[str], batch_size: int) -> Any:
        """Prefer groups with a signal to fillers."""
        kept = sampleable_keys - self._fillers
        chosen = kept if len(kept) >= batch_size else sampleable_keys
        return super()._select_prompt_uids(partition_id, chosen, batch_size)

    def _forget_all_but(self, uids: set[str]) -> None:
        for uid in self._fates.keys() - uids:
            del self._fates[uid]
            self._alike.pop(uid, None)
        self._fillers &= uids
        self._unscored = {key for key in self._unscored if key.split("_")[0] in uids}

    def _judge(self, uid: str, group: dict[str, Mapping[str, Any]]) -> None:
        sequences, group = group, one_of_each_episode(group)
        if drift := sum(float(sample.get(DRIFT, 0.0)) for sample in group.values()):
            raise EngineError(
                f"{drift:.0f} tokens of the samples {', '.join(sorted(group))} differ from those that the rollout engine "
                "received and returned; training on them would be off-policy without any sign of it"
            )
        checked = {"reward", self.filter_groups_metric, *PARTS}
        for key, sample in group.items():
            rewards = {name: value for name, value in sample.items() if name in checked}
            refuse_non_finite(rewards, data_source=str(sample.get(SOURCE)), episode=key)
        self._failed += [str(sample[FAILED]) for sample in group.values() if sample.get(FAILED)]
        self._episodes += len(group)
        planned = self._options.train_batch_size * self._options.samples_per_prompt
        self._bound_failures(
            self._failed, max(planned, self._episodes)
        )  # group filtering may roll out more episodes
        samples = SampleGroup(list(group.values()))
        try:
            fate = self._ledger.add(uid, samples, self._evidence.pop(uid, ""))
        except KeyError as error:
            known = sorted({key for sample in group.values() for key in sample} - {SOURCE, QUESTION, FAILED})
            raise ConfigError(
                f"algorithm.filter_groups.metric={self.filter_groups_metric}: the reward reports no {error}; "
                f"expected one of: {', '.join(known)}"
            ) from None
        self._fates[uid] = fate
        if fate is GroupFate.ALIKE:
            self._alike[uid] = float(samples.scored[0][str(self.filter_groups_metric)])
        void = fate is GroupFate.VOID
        self._unscored.update(key for key, facts in sequences.items() if void or facts.get(ABSTAINED))

    def _bound_failures(self, errors: list[str], episodes: int) -> None:
        """Raise :class:`EpisodesFailedError` if more episodes failed than a run may lose."""
        allowed = self._options.max_failed_episodes
        allowed = max(1, episodes // 100) if allowed is None else allowed
        if len(errors) > allowed:
            raise EpisodesFailedError(
                f"{len(errors)} of {episodes} episodes failed, more than max_failed_episodes allows ({allowed}): "
                f"{'; '.join(sorted(errors)[:3])} (all errors with their tracebacks: {FAILURES_FILE}). Repair the cause "
                "and start the same command again, or raise max_failed_episodes"
            )

    def _groups(self, partition_id: str, uids: set[str]) -> dict[str, dict[str, Mapping[str, Any]]]:
        """Return the facts of every sample by prompt and key. A prompt without a sample has an empty group."""
        groups: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict, {uid: {} for uid in uids})
        keys = [key for key in self.partitions[partition_id] if key.split("_")[0] in uids]
        if keys:
            data = tq.kv_batch_get(
                keys=keys, partition_id=partition_id, select_fields=["extra_fields", "rm_scores"]
            )
            for key, extra, scores in zip(keys, data["extra_fields"], data["rm_scores"], strict=True):
                fields_of = getattr(extra, "data", extra)
                if reason := fields_of.get(ABSTAINED):
                    self._evidence[key.split("_")[0]] = str(reason)
                facts = {"reward": float(scores.sum())} | dict(fields_of.get("reward_extra_info") or {})
                facts |= {key: fields_of.get(key) for key in (SOURCE, QUESTION, FAILED)}
                groups[key.split("_")[0]][key] = facts
        return groups

    def _materialize_batch(
        self, partition_id: str, selected: list[str], snapshot: dict[str, dict[str, Any]]
    ) -> Any:
        """Drop the samples without a score, which would shift their group's mean. Raise if no sample has one."""
        chosen = set(selected)
        # verl does not filter groups of a validation, so these samples have not been judged yet.
        if partition_id != TRAIN:
            self._note_unscored(partition_id, [key for key in snapshot if key.split("_")[0] in chosen])
        unscored = [key for key in snapshot if key in self._unscored and key.split("_")[0] in chosen]
        if unscored:
            # verl clears only the keys of its batch, so these would stay in the queue.
            tq.kv_clear(partition_id=partition_id, keys=unscored)
            snapshot = {key: tag for key, tag in snapshot.items() if key not in self._unscored}
        if unscored and not any(key.split("_")[0] in chosen for key in snapshot):
            reason = self._ledger.evidence or next(iter(self._evidence.values()), "no reason given")
            purpose = "train on" if partition_id == TRAIN else "validate with"
            raise RewardError(
                f"the reward abstained for every sample of the batch ({len(unscored)}), so there is nothing to "
                f"{purpose}: {reason}"
            )
        return super()._materialize_batch(partition_id, selected, snapshot)

    def _note_unscored(self, partition_id: str, keys: list[str]) -> None:
        """Record the samples of a validation whose reward abstained. They are dropped, not counted as wrong."""
        if not keys:
            return
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["extra_fields"])
        fields_of = [getattr(extra, "data", extra) for extra in data["extra_fields"]]
        for key, known in zip(keys, fields_of, strict=True):
            if reason := known.get(ABSTAINED):
                self._unscored.add(key)
                self._evidence.setdefault(key.split("_")[0], str(reason))
        self._bound_failures([str(known[FAILED]) for known in fields_of if known.get(FAILED)], len(keys))

    def _waiting(self, trained: set[str]) -> set[str]:
        """Return the finished groups that a later step may train on."""
        return set()


def one_of_each_episode(group: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the facts of one sequence per episode. All sequences of an episode have the facts of the whole episode.

    Args:
        group: Facts by key, ``UID_SAMPLE_OUTPUT``.
    """
    last: dict[str, str] = {}
    for key in sorted(group, key=lambda key: int(key.rpartition("_")[2])):
        last[key.rpartition("_")[0]] = key
    return {key: group[key] for key in last.values()}


class GuardedBuffer(_Guarded):
    """The sampler of the synchronous trainer, which discards the groups that it does not train on."""


class GuardedAsyncBuffer(_Guarded, ReplayBufferAsync):
    """The sampler of the asynchronous trainers, which roll out ahead."""

    def get_sampleable_count(self, global_steps: int, partition_id: str) -> int:
        """Count as verl does, with the reason of an intended end written. verl also counts between two batches."""
        with self._telling():
            return int(super().get_sampleable_count(global_steps, partition_id))

    def wait_for_sampleable(self, global_steps: int, partition_id: str, target_count: int) -> Any:
        """Wait as verl does, with the reason of an intended end written. verl also waits before it takes a batch."""
        with self._telling():
            return super().wait_for_sampleable(global_steps, partition_id, target_count)

    def _waiting(self, trained: set[str]) -> set[str]:
        return set(self.finished_keys[TRAIN]) - trained
