"""Our sampler on a real TransferQueue: groups, abstentions, failures."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from extras import needs

from afm.errors import ConfigError, EngineError, RewardError
from verl_ext.curriculum import QUESTION
from verl_ext.processes import scratch_folder

needs("verl")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    options = {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "object_store_memory": 100 << 20}
    with scratch_folder() as folder:
        ray.init(address="local", num_cpus=4, _temp_dir=str(folder), **options)
        tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
        yield tq
        tq.close()
        ray.shutdown()


@pytest.fixture
def put(queue: Any) -> Iterator[Callable[..., None]]:
    """Put a finished group: one value of ``acc`` per sample, ``None`` for an abstention."""
    import torch
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    def put_group(
        uid: str,
        *values: float | None,
        status: str = "finished",
        step: int = 1,
        to: str = "train",
        failed: str = "",
    ) -> None:
        tag = {"is_prompt": True, "status": status, "global_steps": step}
        queue.kv_put(key=uid, partition_id=to, tag=tag)
        rows = [
            {
                "rm_scores": torch.tensor([0.0, value or 0.0]),
                "extra_fields": {
                    "reward_extra_info": {"acc": value or 0.0, "abstained": float(value is None)},
                    "abstained": "no gold" if value is None else "",
                    "failed": failed if value is None else "",
                    "data_source": "nq",
                    QUESTION: uid,
                },
            }
            for value in values
        ]
        if rows:
            queue.kv_batch_put(
                keys=[f"{uid}_{number}_0" for number in range(len(rows))],
                partition_id=to,
                fields=list_of_dict_to_tensordict(rows),
                tags=[{"status": "success", "seq_len": 2}] * len(rows),
            )

    yield put_group
    for partition, left in (queue.kv_list() or {}).items():
        if left:
            queue.kv_clear(partition_id=partition, keys=list(left))


def sampler(
    tmp_path: Path, refill: Callable[[int], None] | None = None, mode: str = "sync", **changes: Any
) -> Any:
    from verl_ext.sampler import sampler_for

    options = {
        "filter_groups": {"enable": True, "metric": "acc", "max_num_gen_batches": 2},
        "train_batch_size": 2,
        "samples_per_prompt": 3,
        "output_dir": str(tmp_path),
        "poll_interval_s": 0.01,
    }
    return sampler_for(
        trainer_mode=mode,
        trainer_config={},
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
        sampler_kwargs=options | changes,
        refill_fn=refill or (lambda count: None),
    )


def alike(put: Any, value: float) -> Callable[[int], None]:
    """Refill with groups without a signal."""
    numbers = itertools.count()

    def refill(count: int) -> None:
        for _ in range(count):
            put(f"more{next(numbers)}", value, value, value)

    return refill


def test_groups_that_are_alike_are_replaced_and_counted(put: Any, tmp_path: Path) -> None:
    fresh = iter([("c", (1, 0, 1)), ("d", (0, 0, 1))])

    def refill(count: int) -> None:
        for _ in range(count):
            name, values = next(fresh)
            put(name, *values)

    put("a", 1, 0, 0)
    put("b", 0, 0, 0)
    batch, metrics = sampler(tmp_path, refill).sample(1, "train", 2)
    kept = {key.split("_")[0] for key in batch.keys}
    assert len(kept) == 2
    assert kept <= {"a", "c", "d"}
    assert len(batch.keys) == 6
    assert metrics["groups/generated"] == 4
    assert metrics["groups/kept"] == 3
    assert metrics["groups/surplus"] == metrics["training/filter_groups/discarded_surplus_samples"] == 1
    assert metrics["groups/alike_failed"] == 1
    assert metrics["rollout/acc"] == pytest.approx(4 / 12)


def test_an_episode_with_several_sequences_counts_once(queue: Any, put: Any, tmp_path: Path) -> None:
    """Group a: two episodes, the second with three sequences. Counted by sequence its mean would be 3/4."""
    import torch
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    put("a", 0, 1, None)
    put("b", 1, 0, 0)
    facts = {"acc": 1.0, "abstained": 0.0, "harness_timeout": 2.0, "token_drift": 0.0}
    more = {"reward_extra_info": facts, "abstained": "", "failed": "", "data_source": "nq"}
    row = {"rm_scores": torch.tensor([0.0, 1.0]), "extra_fields": more}
    queue.kv_batch_put(
        keys=["a_1_1", "a_1_2"],
        partition_id="train",
        fields=list_of_dict_to_tensordict([row, row]),
        tags=[{"status": "success", "seq_len": 2}] * 2,
    )
    batch, metrics = sampler(tmp_path).sample(1, "train", 2)
    assert sorted(batch.keys) == ["a_0_0", "a_1_0", "a_1_1", "a_1_2", "b_0_0", "b_1_0", "b_2_0"]
    assert metrics["rollout/acc"] == pytest.approx(2 / 5)
    assert (metrics["groups/abstained_samples"], metrics["harness/timeout"]) == (1, 2)


def test_an_episode_with_an_abstention_leaves_with_all_of_its_sequences(
    queue: Any, put: Any, tmp_path: Path
) -> None:
    import torch
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    put("a", 0, 1, None)
    put("b", 1, 0, 0)
    facts = {"acc": 0.0, "abstained": 1.0}
    more = {"reward_extra_info": facts, "abstained": "hung", "failed": "", "data_source": "nq"}
    queue.kv_batch_put(
        keys=["a_2_1"],
        partition_id="train",
        fields=list_of_dict_to_tensordict([{"rm_scores": torch.zeros(2), "extra_fields": more}]),
        tags=[{"status": "success", "seq_len": 2}],
    )
    batch, metrics = sampler(tmp_path).sample(1, "train", 2)
    assert sorted(batch.keys) == ["a_0_0", "a_1_0", "b_0_0", "b_1_0", "b_2_0"]
    assert metrics["groups/abstained_samples"] == 1


def credit_config(credit: str, by_member: str = "shared") -> Any:
    from omegaconf import OmegaConf

    trainer = {"harness_credit": credit, "harness_by_member": by_member}
    return OmegaConf.create({"trainer": trainer, "algorithm": {}})


def test_a_filler_has_no_advantage(queue: Any, put: Any) -> None:
    """Its samples are equally correct, but verl compares rewards, which may differ in the penalty for length."""
    import torch
    from transfer_queue import KVBatchMeta
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    from verl_ext.group_guard import without_advantage

    rows = [{"advantages": torch.tensor([2.0, 0.0, -1.0][:length])} for length in (3, 1, 2)]
    keys = ["u_0_0", "filler_0_0", "filler_1_0"]
    tags: list[dict[str, Any]] = [{}] * 3
    queue.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=tags)
    without_advantage(queue, KVBatchMeta(keys=keys, tags=tags, partition_id="train"), {"filler"})
    data = queue.kv_batch_get(keys=keys, partition_id="train", select_fields=["advantages", "returns"])
    for name in ("advantages", "returns"):
        assert [row.tolist() for row in data[name].unbind()] == [[2.0, 0.0, -1.0], [0.0], [0.0, 0.0]]


def test_shares_of_an_episode_are_multiplied_into_its_advantages(queue: Any, put: Any) -> None:
    """By turn, 3 and 1 of 4: advantages 2 become 1.5 and 0.5."""
    import torch
    from transfer_queue import KVBatchMeta
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    from verl_ext.training_sample import share_advantages

    rows = [
        {"advantages": torch.tensor([2.0, 0.0, 2.0][:length]), "extra_fields": extra}
        for length, extra in ((3, {"credit": 0.75}), (1, {"credit": 0.25}), (2, {}))
    ]
    keys = ["u_0_0", "u_0_1", "pad_0_0"]
    tags: list[dict[str, Any]] = [{}] * 3
    queue.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=tags)
    share_advantages(queue, KVBatchMeta(keys=keys, tags=tags, partition_id="train"), credit_config("by_turn"))
    data = queue.kv_batch_get(keys=keys, partition_id="train", select_fields=["advantages", "returns"])
    got = [[row.tolist() for row in data[name].unbind()] for name in ("advantages", "returns")]
    assert got == [[[1.5, 0.0, 1.5], [0.5], [2.0, 0.0]]] * 2


def test_a_member_of_a_team_gets_its_own_advantage_in_its_group(queue: Any) -> None:
    """Two episodes scored 1 and 0, std 0.70711; the planner says the same in both, the verifier judged 0 and 1.

    difference: planner 0, verifier (1 - 0) / 0.70711 and its opposite. own: planner (1 - 1/2) / 0.70711, verifier (0 - 1/2).
    The verifier of the first episode has two sequences with shares of 1/2. A filler has no member.
    """
    import torch
    from transfer_queue import KVBatchMeta
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    from afm.harness.credit import MemberCredit
    from verl_ext.training_sample import share_advantages

    def extra(member: str, score: float, own: float, words: str, share: float = 1.0) -> dict[str, Any]:
        return {"credit": share, "member": {"member": member, "score": score, "own": own, "words": words}}

    extras = {
        "u_0_0": extra("planner", 1, 1, "a"),
        "u_0_1": extra("verifier", 1, 0, "x", 0.5),
        "u_0_2": extra("verifier", 1, 0, "x", 0.5),
        "u_1_0": extra("planner", 0, 0, "a"),
        "u_1_1": extra("verifier", 0, 1, "y"),
        "f_0_0": {"credit": 1.0, "member": {}},
    }
    rows = [
        {
            "advantages": torch.tensor([9.0, 0.0, 9.0]),
            "response_mask": torch.tensor([1, 0, 1]),
            "extra_fields": each,
        }
        for each in extras.values()
    ]
    keys, tags = [*extras], [dict[str, Any]() for _ in extras]
    unit = 1 / 0.70711
    expected = {
        MemberCredit.DIFFERENCE: [0, unit / 2, unit / 2, 0, -unit, 9],
        MemberCredit.OWN: [unit / 2, -unit / 4, -unit / 4, -unit / 2, unit / 2, 9],
    }
    for credit, values in expected.items():
        queue.kv_batch_put(
            keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=tags
        )
        config = credit_config("all", credit.value)
        share_advantages(queue, KVBatchMeta(keys=keys, tags=tags, partition_id="train"), config)
        data = queue.kv_batch_get(keys=keys, partition_id="train", select_fields=["advantages"])
        for row, value in zip(data["advantages"].unbind(), values, strict=True):
            assert row.tolist() == pytest.approx([value, 0, value], abs=1e-4)


def test_samples_without_a_score_leave_their_group(put: Any, tmp_path: Path) -> None:
    put("a", 1, 0, None)
    put("b", 1, 0, 0)
    batch, metrics = sampler(tmp_path).sample(1, "train", 2)
    assert sorted(batch.keys) == ["a_0_0", "a_1_0", "b_0_0", "b_1_0", "b_2_0"]
    assert metrics["groups/abstained_samples"] == 1
    assert metrics["rollout/acc"] == pytest.approx(2 / 5)


def test_without_filtering_a_group_with_a_single_score_is_left_out(put: Any, tmp_path: Path) -> None:
    put("a", 1, None, None)
    put("b", 1, 1, 1)
    filtering = {"enable": False, "metric": "acc"}
    batch, metrics = sampler(tmp_path, filter_groups=filtering).sample(1, "train", 2)
    assert sorted(batch.keys) == ["b_0_0", "b_1_0", "b_2_0"]
    assert metrics["groups/void"] == 1
    assert metrics["groups/alike"] == 0


def test_a_batch_without_any_score_ends_the_run(put: Any, tmp_path: Path) -> None:
    put("a", None, None, None)
    put("b", None, None, None)
    with pytest.raises(
        RewardError, match=r"every sample of the batch \(6\), so there is nothing to train on: no gold"
    ):
        sampler(tmp_path, filter_groups={"enable": False, "metric": "acc"}).sample(1, "train", 2)
    assert "abstained for every sample" in json.loads((tmp_path / "failure.json").read_text())["message"]


def test_a_reward_that_never_differs_ends_the_run_with_advice(put: Any, tmp_path: Path) -> None:
    from verl_ext.group_guard import GroupsAlikeError

    refill = alike(put, 0)
    put("a", 0, 0, 0)
    put("b", 0, 0, 0)
    with pytest.raises(GroupsAlikeError, match="the reward cannot be earned"):
        sampler(tmp_path, refill).sample(1, "train", 2)
    assert json.loads((tmp_path / "failure.json").read_text())["error"] == "GroupsAlikeError"


def test_an_exhausted_step_is_filled_up_with_groups_that_change_nothing(put: Any, tmp_path: Path) -> None:
    refill = alike(put, 1)
    put("a", 1, 0, 1)
    put("b", 1, 1, 1)
    batch, metrics = sampler(tmp_path, refill, short_batch="fill").sample(1, "train", 2)
    kept = {key.split("_")[0] for key in batch.keys}
    assert len(kept) == 2
    assert "a" in kept
    assert metrics["groups/kept"] == 1
    assert metrics["groups/fillers"] == 1
    assert 4 <= metrics["groups/generated"] <= 6


def test_an_episode_that_failed_ends_the_run_with_its_reason(put: Any, tmp_path: Path) -> None:
    row = {"prompt": "p", "error": "EngineError", "message": "server died", "traceback": ""}
    (tmp_path / "failures.jsonl").write_text(json.dumps(row) + "\n")
    put("a", 1, 0, 1)
    put("b", 1, status="failure")
    with pytest.raises(EngineError, match="1 prompt could not be rolled out: EngineError: server died"):
        sampler(tmp_path).sample(1, "train", 2)


def test_as_many_episodes_as_allowed_may_fail_and_are_not_trained_on(put: Any, tmp_path: Path) -> None:
    """1 % of 6 rounds to 0, so the minimum of one applies."""
    buffer = sampler(tmp_path)
    for step in (1, 2):
        put(f"a{step}", 1, 0, None, step=step, failed="episode 1/a/2: KeyError: 'x'")
        put(f"b{step}", 1, 0, 0, step=step)
        batch, metrics = buffer.sample(step, "train", 2)
        assert sorted(batch.keys) == [
            f"{name}_0" for name in (f"a{step}_0", f"a{step}_1", *(f"b{step}_{k}" for k in range(3)))
        ]
        assert (metrics["groups/failed_samples"], metrics["groups/abstained_samples"]) == (1, 0)
        assert metrics["groups/generated"] == 2  # each step counts from zero


@pytest.mark.parametrize("to", ["train", "val"])
@pytest.mark.parametrize(("allowed", "failures"), [(None, 2), (0, 1), (2, 3)])
def test_more_failed_episodes_than_allowed_end_the_run_and_the_first_are_named(
    put: Any, tmp_path: Path, to: str, allowed: int | None, failures: int
) -> None:
    from verl_ext.group_guard import EpisodesFailedError

    put("a", 1, *[None] * (failures - 1), 0, to=to, failed="episode 1/a/1: KeyError: 'x'")
    put("b", 1, 0, None, to=to, failed="episode 1/b/2: DataError: no question")
    message = rf"^{failures} of \d+ episodes failed, more than max_failed_episodes allows \({1 if allowed is None else allowed}\): .*1/b/2: DataError"
    with pytest.raises(EpisodesFailedError, match=message):
        sampler(tmp_path, max_failed_episodes=allowed).sample(1, to, 2)
    assert json.loads((tmp_path / "failure.json").read_text())["error"] == "EpisodesFailedError"


def test_groups_that_are_rolled_out_to_refill_a_step_may_fail_as_often_as_others(
    put: Any, tmp_path: Path
) -> None:
    """6 episodes are planned and 226 are rolled out, so 2 may fail."""
    for uid in "ab":
        put(uid, None, *[0] * 109, failed="episode 1/a/1: KeyError: 'x'")
    for uid in "cd":
        put(uid, 0, 1, 1)
    batch, metrics = sampler(tmp_path).sample(1, "train", 2)
    assert (len(batch.keys), metrics["groups/failed_samples"]) == (6, 2)


def test_a_metric_that_the_reward_does_not_report_is_named(put: Any, tmp_path: Path) -> None:
    put("a", 1, 0, 1)
    filtering = {"enable": True, "metric": "accuracy", "max_num_gen_batches": 2}
    with pytest.raises(ConfigError, match=r"no 'accuracy'; expected one of: abstained, acc, reward"):
        sampler(tmp_path, filter_groups=filtering).sample(1, "train", 2)


def test_a_reward_that_is_no_number_ends_the_run_and_is_named(put: Any, tmp_path: Path) -> None:
    put("a", 1, 0, 1)
    put("b", 1, float("nan"), 0)
    with pytest.raises(RewardError, match=r"episode b_1_0 \(data_source 'nq'\) .*acc = nan"):
        sampler(tmp_path).sample(1, "train", 2)
    assert json.loads((tmp_path / "failure.json").read_text())["error"] == "RewardError"


def test_a_validation_leaves_out_what_the_reward_abstained_on(put: Any, tmp_path: Path) -> None:
    put("a", 1, None, to="val")
    put("b", None, None, to="val")
    buffer = sampler(tmp_path)
    batch, _ = buffer.sample(1, "val", 2)
    assert batch.keys == ["a_0_0"]
    put("c", None, to="val")
    with pytest.raises(RewardError, match=r"every sample of the batch \(1\), .* to validate with: no gold"):
        buffer.sample(1, "val", 1)


def test_groups_rolled_out_ahead_are_counted_in_the_step_that_trains_on_them(
    put: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds if the step before saw them, a validation between the two, or verl's own count.

    The curriculum records them then, too. A run that resumes in between judges them again.
    """
    asked: list[str] = []
    curriculum = SimpleNamespace(record=lambda question, _: asked.append(question), metrics=dict)
    monkeypatch.setattr("verl_ext.sampler.running", lambda: curriculum)
    buffer = sampler(tmp_path, mode="colocate_async")
    for uid in ("a", "b", "ahead"):
        put(uid, 1, 0, 0)
    batch, metrics = buffer.sample(1, "train", 2)  # verl takes any two
    assert metrics["groups/generated"] == 2
    assert sorted(asked) == sorted({key.split("_")[0] for key in batch.keys})
    put("question", 1, to="val")
    buffer.sample(1, "val", 1)
    put("later", 1, 1, 0, step=2)
    assert buffer.get_sampleable_count(2, "train") == 2
    _, metrics = buffer.sample(2, "train", 2)
    assert metrics["groups/generated"] == 2
    assert metrics["rollout/acc"] == pytest.approx(3 / 6)
    assert sorted(asked) == ["a", "ahead", "b", "later"]


def test_a_filler_that_was_not_needed_after_all_is_not_counted(put: Any, tmp_path: Path) -> None:
    put("a", 1, 0, 1)
    put("alike", 1, 1, 1)
    put("slow", 1, 1, 1, status="running")
    buffer = sampler(
        tmp_path,
        short_batch="fill",
        filter_groups={"enable": True, "metric": "acc", "max_num_gen_batches": 1},
    )
    look = buffer._sync_metadata_from_transfer_queue

    def look_then_finish() -> None:
        look()
        put("slow", 0, 1, 1)

    buffer._sync_metadata_from_transfer_queue = look_then_finish
    batch, metrics = buffer.sample(1, "train", 2)
    assert {key.split("_")[0] for key in batch.keys} == {"a", "slow"}
    assert metrics["groups/fillers"] == 0


def test_an_unknown_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'poll_interval_s'"):
        sampler(tmp_path, poll_interval=1)
