import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from extras import needs

from afm.errors import ConfigError
from verl_ext.command import command, environment, ray_overrides, steps_of, total_steps, trainer_environment
from verl_ext.compose import DERIVED, base_overrides, compose, flatten, hydra_text, overrides_of
from verl_ext.doctor import called_tools
from verl_ext.settings import RlSettings
from verl_ext.sizes import budget_faults, check, sizes_of

needs("verl")
OmegaConf = pytest.importorskip("omegaconf").OmegaConf


def settings(tmp_path: Path, **changes: Any) -> RlSettings:
    given: dict[str, Any] = {
        "agent": "math",
        "model": "some model",
        "train_files": ["train.parquet"],
        "output_dir": tmp_path / "a run",
        "platform": "cpu",
        "verl": {
            "algorithm": {"adv_estimator": "grpo"},
            "data": {"train_batch_size": 8},
            "actor_rollout_ref": {
                "actor": {"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 16},
                "rollout": {"n": 8, "log_prob_micro_batch_size_per_gpu": 32},
            },
        },
    }
    return RlSettings.model_validate(given | changes)


def test_a_plus_anywhere_in_a_key_adds_it() -> None:
    assert dict(flatten({"a": {"+b": {"c": 1}}, "+d": [1]})) == {"+a.b.c": 1, "+d": [1]}
    assert dict(flatten({"a": {}})) == {"a": {}}


@pytest.mark.parametrize(
    "value",
    [
        "a'b", "a\\'b", "ends\\", "x y", "1e-4", "true", "null", "a,b", "a=b", "it's \\\\ two", "", "[x]", "äö",
        "pkg://a.b", "/a/b-c.d", 3, 1e-6, -2.5, True, None, [1, "a b", None], {"k": [1, "x y"]},
    ],
)  # fmt: skip
def test_every_value_reaches_verl_unchanged(value: Any) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    def plain(parsed: Any) -> Any:
        if isinstance(parsed, list):
            return [plain(item) for item in parsed]
        if isinstance(parsed, dict):
            return {key: plain(item) for key, item in parsed.items()}
        return getattr(parsed, "text", parsed)

    parsed = plain(OverridesParser.create().parse_override(f"key={hydra_text(value)}").value())
    assert (parsed, type(parsed)) == (value, type(value))


def test_the_composed_configuration_holds_what_the_settings_say(tmp_path: Path) -> None:
    _, config = command(settings(tmp_path, limits={"max_response_tokens": 96}, seed=5), "/tmp/ray")
    assert config.data.max_response_length == 96
    assert (config.data.seed, config.actor_rollout_ref.model.path) == (5, "some model")
    assert config.actor_rollout_ref.rollout.name == "afm_cpu"
    assert config.trainer.default_local_dir == str(tmp_path / "a run" / "checkpoints")
    assert config.trainer.v1.sampler.sampler_kwargs.train_batch_size == 8
    assert config.trainer.v1.sampler.sampler_kwargs.filter_groups.max_num_gen_batches == 10
    assert config.ray_kwargs.ray_init.address == "local"


def test_verls_own_balancer_chooses_the_server_unless_a_worker_has_several(tmp_path: Path) -> None:
    def router(**rollout: Any) -> Any:
        overrides = overrides_of(settings(tmp_path, verl={"actor_rollout_ref": {"rollout": rollout}}))
        return overrides.get("actor_rollout_ref.rollout.router_config_path")

    assert router(full_determinism=True) is None
    assert router(**{"+engine_kwargs": {"afm_cpu": {"processes": 1}}}) is None
    several = {"+engine_kwargs": {"afm_cpu": {"processes": 2}}}
    assert str(router(**several)).endswith("verl_ext/cpu_router.yaml")
    assert router(**several, router_config_path="mine.yaml") == "mine.yaml"


def test_a_gpu_run_keeps_verls_engine_and_platform(tmp_path: Path) -> None:
    verl = {"actor_rollout_ref": {"rollout": {"name": "sglang"}}}
    gpu = settings(tmp_path, platform="gpu", verl=verl)
    config = compose(overrides_of(gpu))
    assert config.actor_rollout_ref.rollout.name == "sglang"
    assert config.trainer.device == "cuda"
    assert "VERL_PLATFORM" not in environment(gpu)


@pytest.mark.parametrize(
    ("verl", "message"),
    [
        ({"data": {"train_bach_size": 1}}, "verl.data has no key 'train_bach_size'; did you mean 'train_batch_size'?"),
        ({"actor_rollout_ref": {"rollout": {"enable_sleep_mod": False}}}, "did you mean 'enable_sleep_mode'?"),
        ({"actor_rollout_ref": {"rollout": {"+enable_sleep_mod": False}}}, "did you mean 'enable_sleep_mode'?"),
        ({"actor_rollout_ref": {"rollout": {"disaggregation": {"enabeld": True}}}}, "did you mean 'enabled'?"),
        ({"actor_rollout_ref": {"actor": {"lr": 1}}}, "has no key 'lr'; did you mean verl.actor_rollout_ref.actor.optim.lr?"),
        ({"optim": {"lr": 1}}, "did you mean verl.actor_rollout_ref.actor.optim.lr or verl.critic.optim.lr?"),
        ({"trainer": {"mine": {"a": 1}}}, "verl.trainer.+mine.a=VALUE adds a key that verl's YAML"),
        ({"data": {"train_files": "x.parquet"}}, "verl.data.train_files: got 'x.parquet', but the other settings"),
        ({"data": {"max_response_length": 5}}, "verl.data.max_response_length: got 5, but the other settings"),
        ({"data": {"max_response_length": 5}}, "; set limits.max_response_tokens instead"),
        ({"trainer": {"resume_mode": "disable"}}, "determine it ('auto'); remove it from `verl:`"),
        ({"data": {"train_batch_size": {"a": 1}}}, "train_batch_size"),
    ],
)  # fmt: skip
def test_keys_that_verl_does_not_take_are_refused(tmp_path: Path, verl: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(overrides_of(settings(tmp_path, verl=verl)))
    assert message in str(caught.value)


@pytest.mark.parametrize("plus", ["", "+"])
def test_fields_that_verls_yaml_lacks_can_be_set_with_and_without_a_plus(tmp_path: Path, plus: str) -> None:
    """One field is only verl's. The other has a default of ours."""
    model = {"override_config": {f"{plus}attn_implementation": "eager"}}
    verl = {"actor_rollout_ref": {"rollout": {f"{plus}enable_sleep_mode": False}, "model": model}}
    made = overrides_of(settings(tmp_path, verl=verl))
    assert made["+actor_rollout_ref.rollout.enable_sleep_mode"] is False
    assert made["+actor_rollout_ref.model.override_config.attn_implementation"] == "eager"


def test_the_page_lists_the_derived_keys_and_each_is_derived(tmp_path: Path) -> None:
    with_teacher = settings(
        tmp_path, curriculum={}, teacher={"model": "t"}, limits={"max_response_tokens": 9}
    )
    fixed = base_overrides(with_teacher) | ray_overrides(with_teacher, "/tmp/ray")
    assert set(DERIVED) <= {key.lstrip("+") for key in fixed}
    page = (Path(__file__).resolve().parents[2] / "docs/rl.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `verl\.([\w.]+)` \| `([\w.]+)` \|$", page, re.MULTILINE)
    assert listed == list(DERIVED.items())


def test_keys_of_the_callers_own_are_added(tmp_path: Path) -> None:
    nested = {"trainer": {"+mine": {"a": 1}}, "algorithm": {"+mine": 3}}
    nested |= {"actor_rollout_ref": {"rollout": {"custom": {"b": 2}}}}
    config = compose(overrides_of(settings(tmp_path, verl=nested)))
    assert (config.trainer.mine.a, config.actor_rollout_ref.rollout.custom.b) == (1, 2)
    assert config.algorithm.mine == 3


@pytest.mark.parametrize(("strategy", "whole"), [("fsdp2", False), ("fsdp", True)])
def test_checkpoints_hold_the_model_once_where_its_parts_can_be_put_together(
    tmp_path: Path, strategy: str, whole: bool
) -> None:
    chosen = {"actor_rollout_ref": {"actor": {"strategy": strategy}}}
    config = compose(overrides_of(settings(tmp_path, verl=chosen, platform="gpu")))
    saved = config.actor_rollout_ref.actor.checkpoint.save_contents
    assert saved == ["model", "optimizer", "extra"] + ["hf_model"] * whole


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """verl's configuration of the settings above, shared because composing one takes half a second."""
    return compose(overrides_of(settings(tmp_path_factory.mktemp("plain"))))


@pytest.fixture
def changed(plain: Any) -> Callable[[Mapping[str, Any]], Any]:
    def change(values: Mapping[str, Any]) -> Any:
        config = deepcopy(plain)
        for key, value in values.items():
            OmegaConf.update(config, key, value)
        return config

    return change


ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
CRITIC = {"algorithm.adv_estimator": "gae", "critic.ppo_micro_batch_size_per_gpu": 1}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.train_batch_size", 6, "expected a multiple"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", 12, r"expected one of 1, 2, 4, 8, 16, 32 \(divisors of 32\): a data rank has actor\.ppo_mini_batch_size x rollout\.n"),
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", 0, "got 0, expected a positive whole number, or null"),
        (f"{ACTOR}.fsdp_config.fsdp_size", 0, "got 0, expected a positive whole number, or -1 for all GPUs"),
        (f"{ACTOR}.fsdp_config.fsdp_size", None, "got None, expected a positive whole number, or -1"),
        ("trainer.n_gpus_per_node", 5, "is not divisible by 5 data ranks; expected actor.ppo_mini_batch_size 5, 10 or another multiple of 5"),
        (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", 48, r"is 48; expected one of .*, 64 \(divisors of 64\)"),
        ("data.train_batch_size", "many", "got 'many', expected a positive whole number"),
        (f"{ROLLOUT}.log_prob_use_dynamic_bsz", True, r"log_prob_use_dynamic_bsz is True, .* verl requires equal values"),
        (f"{ROLLOUT}.gpu_memory_utilization", 1.5, "got 1.5, expected a share"),
        ("algorithm.adv_estimator", "grop", "got 'grop'; did you mean 'grpo'"),
        ("trainer.v1.trainer_mode", "separate_async", "parameter_sync_step x actor.ppo_mini_batch_size = 4 x 4"),
        ("algorithm.rollout_correction.rollout_is", "tokens", "got 'tokens'; did you mean 'token'"),
        ("trainer.v1.sampler.max_off_policy_strategy", "keep", "expected one of: drop, wait"),
        (f"{ACTOR}.optim.lr", "abc", "got 'abc', expected a number"),
        (f"{ROLLOUT}.temperature", 0.0, "expected a number above 0"),
        ("trainer.total_training_steps", 0, "got 0, expected a positive whole number, or null"),
        ("algorithm.filter_groups.max_num_gen_batches", "ten", "got 'ten', expected a whole number"),
        ("algorithm.adv_estimator", "gae", "critic.ppo_micro_batch_size_per_gpu is None"),
        ("algorithm.use_kl_in_reward", True, "ref.log_prob_micro_batch_size_per_gpu is None"),
    ],
)  # fmt: skip
def test_batch_arithmetic_is_checked_before_anything_starts(
    changed: Any, key: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(changed({key: value}))


HARNESS = r"rollout\.log_prob_micro_batch_size_per_gpu is {}; expected one of {} \(divisors of {}\): .*"


@pytest.mark.parametrize(
    ("credit", "changes", "message"),
    [
        # Two mini batches a step, 4 prompts x 8 samples each. A branching program may make three of them.
        ("all", {}, HARNESS.format(64, "1, 2, 4, 8, 16, 32", 32) + r"a multiple of 1 \(data ranks\) and 32 \(actor\.ppo_mini_batch_size x rollout\.n\)"),
        ("by_turn", {"trainer.n_gpus_per_node": 2}, HARNESS.format(64, "1, 2, 4, 8, 16", 16) + "shared by 2 data ranks"),
        ("last", {}, None),
        ("all", {f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 32}, None),
        ("all", {"algorithm.use_kl_in_reward": True, f"{REF}.log_prob_micro_batch_size_per_gpu": 64}, r"ref\.log_prob_micro"),
        # A critic's mini batch of 64 samples, so 64 is the least; without the actor's updates only the critic's counts.
        ("all", CRITIC | {"critic.ppo_mini_batch_size": 8}, None),
        ("all", CRITIC | {"critic.ppo_mini_batch_size": 2, "trainer.critic_warmup": 3}, HARNESS.format(64, "1, 2, 4, 8, 16", 16)),
    ],
)  # fmt: skip
def test_sizes_fit_any_number_of_sequences_that_a_program_may_make(
    changed: Any, credit: str, changes: dict[str, Any], message: str | None
) -> None:
    config = changed({f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 64} | changes)
    OmegaConf.update(config, "trainer.harness_credit", credit, force_add=True)
    if message is None:
        check(config)
        return
    with pytest.raises(ConfigError, match=message):
        check(config)


LENGTHS = {"data.max_prompt_length": 100, "data.max_response_length": 188}
PACKED = LENGTHS | {
    "trainer.n_gpus_per_node": 2,
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 144,
}
SEPARATE = {
    "trainer.v1.trainer_mode": "separate_async",
    "trainer.v1.separate_async.parameter_sync_step": 2,
    "trainer.n_gpus_per_node": 2,
    f"{ROLLOUT}.nnodes": 1,
    f"{ROLLOUT}.n_gpus_per_node": 3,
    f"{ROLLOUT}.tensor_model_parallel_size": 3,
}


@pytest.mark.parametrize(
    "values",
    [
        {f"{ACTOR}.fsdp_config.fsdp_size": 8},  # of one GPU: verl shards over all there are
        PACKED | {f"{ACTOR}.ulysses_sequence_parallel_size": 2},
        PACKED | {f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 2},
        SEPARATE,
    ],
)
def test_what_verl_takes_is_not_refused(changed: Any, values: Mapping[str, Any]) -> None:
    check(changed(values))


def test_a_packed_run_without_a_budget_is_refused(changed: Any) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.log_prob_max_token_len_per_gpu: 0 tokens"):
        check(changed({f"{ACTOR}.use_dynamic_bsz": True, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": None}))


def test_of_the_keys_that_split_the_critics_sequences_that_which_verl_reads_counts(plain: Any) -> None:
    config = deepcopy(plain)
    values = LENGTHS | {"algorithm.adv_estimator": "gae", "critic.ppo_infer_max_token_len_per_gpu": 144}
    for key, value in values.items():
        OmegaConf.update(config, key, value, force_add=True)
    config.critic.ulysses_sequence_parallel_size = 2
    assert any("critic.ppo_infer_max" in fault for fault in budget_faults(sizes_of(config)))
    config.critic.fsdp.ulysses_sequence_parallel_size = 2
    assert not any("critic.ppo_infer_max" in fault for fault in budget_faults(sizes_of(config)))


def test_the_words_are_those_that_verl_knows() -> None:
    from verl.trainer.ppo import core_algos

    from verl_ext.algorithms import CHOICES
    from verl_ext.teacher import REVERSE_KL

    # Ours is registered only in a process of verl's.
    assert set(CHOICES["algorithm.adv_estimator"]) == {*core_algos.ADV_ESTIMATOR_REGISTRY, REVERSE_KL}
    losses = CHOICES["actor_rollout_ref.actor.policy_loss.loss_mode"]
    assert set(losses) == set(core_algos.POLICY_LOSS_REGISTRY)


def test_groups_are_filtered_by_what_samples_tell() -> None:
    from afm.rollout import Episode
    from afm.trajectory.record import Cost, StopReason, Verdict
    from verl_ext.algorithms import FACTS
    from verl_ext.group_guard import DRIFT
    from verl_ext.training_sample import facts

    episode = Episode((1,), (2,), (1,), (0.0,), (), (), StopReason.ANSWER, Cost())
    verdict = Verdict(score=1.0, parts={"correct": 1.0, "format": 1.0, "overlong": 0.0})
    assert set(FACTS) == {*facts(episode, verdict), DRIFT, "reward"}


def test_a_module_of_the_callers_own_may_bring_its_loss(
    changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed({f"{ACTOR}.policy_loss.loss_mode": "mine"})
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)
    with pytest.raises(ConfigError, match="loss_mode"):
        check(config)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "verl_ext,my_losses")
    check(config)
    with pytest.raises(ConfigError, match="trainer_mode: got 'mine'"):
        check(changed({"trainer.v1.trainer_mode": "mine"}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verl": {"trainer": 3}}, "trainer"),
        ({"verl": {"trainer": {"n_gpus_per_node": None}}}, "trainer"),
        ({"rewards": {"formula": "correct * fromat"}}, "did you mean 'format'"),
    ],
)
def test_workers_and_the_reward_are_checked_before_anything_starts(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        command(settings(tmp_path, **changes), "scratch")


def test_group_filtering_needs_several_samples_and_a_fact_of_them(changed: Any) -> None:
    metric = "algorithm.filter_groups.metric"
    for key, value, message in (
        (f"{ROLLOUT}.n", 1, "at least 2 samples per prompt"),
        (metric, "scroe", r"filter_groups\.metric: got 'scroe'; did you mean 'score'"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(changed({"algorithm.filter_groups.enable": True, key: value}))


def test_the_callers_environment_wins_where_there_is_a_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine, verl_ext")
    cpu = trainer_environment(settings(tmp_path))
    assert cpu["OMP_NUM_THREADS"] == "7"
    assert "RAY_ADDRESS" not in cpu
    assert cpu["CUDA_VISIBLE_DEVICES"] == "-1"
    assert cpu["VERL_USE_EXTERNAL_MODULES"] == "verl_ext,mine"
    assert trainer_environment(settings(tmp_path, platform="gpu"))["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_given_cluster_is_joined_and_told_the_environment(tmp_path: Path) -> None:
    joined = settings(tmp_path, ray_address="10.0.0.1:6379")
    words, config = command(joined, "/unused")
    assert config.ray_kwargs.ray_init.address == "10.0.0.1:6379"
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM == "cpu"
    assert not any("_temp_dir" in word for word in words)


def test_an_interpreter_below_a_folder_with_a_blank_starts_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/my project/.venv/bin/python")
    _, config = command(settings(tmp_path), "/unused")
    assert config.ray_kwargs.ray_init.runtime_env.py_executable == "'/my project/.venv/bin/python'"


def test_steps_are_counted_as_verl_counts_them(changed: Any, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    batch = {"data.train_batch_size": 10}
    assert steps_of(changed(batch), 31) == 90
    assert steps_of(changed(batch | {"trainer.total_training_steps": 7}), 31) == 7
    assert steps_of(changed(batch | {"trainer.total_epochs": 2}), 31) == 6
    assert steps_of(changed(batch | {"data.train_max_samples": 20}), 31) == 60
    pa.parquet.write_table(pa.table({"row": range(31)}), tmp_path / "train.parquet")
    few = settings(
        tmp_path, verl={"data": {"train_batch_size": 32}}, train_files=[str(tmp_path / "train.parquet")]
    )
    with pytest.raises(ConfigError, match="31 rows, fewer than a batch"):
        total_steps(few)


def test_more_steps_than_the_epochs_hold_are_not_asked_of_verl(tmp_path: Path) -> None:
    """verl would treat no step as the last one, and save no checkpoint at the end."""
    asked = settings(tmp_path, verl={**settings(tmp_path).verl, "trainer": {"total_training_steps": 60}})
    words, config = command(asked, "scratch", 46)
    assert config.trainer.total_training_steps == 46
    assert "trainer.total_training_steps=46" in words
    assert "trainer.total_training_steps=60" in command(asked, "scratch", 60)[0]


def test_lengths_are_those_of_the_agent_with_the_longest_responses(tmp_path: Path) -> None:
    agents = {
        "code": {"agent": "code", "data_sources": ["codeforces"], "limits": {"max_response_tokens": 900}},
        "math": {"limits": {"max_response_tokens": 300}},
    }
    given = settings(tmp_path, agents=agents, curriculum={})
    overrides = overrides_of(given)
    assert overrides["data.max_response_length"] == 900
    assert overrides["+data.curriculum.settings"] == str(tmp_path / "a run" / "rl_config.yaml")
    assert compose(overrides).data.max_response_length == 900
    assert "+data.curriculum.settings" not in overrides_of(settings(tmp_path, curriculum={}))


def test_an_agent_of_several_whose_tools_are_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"agent 'code' \(agents\.code\) calls \['code'\], but the run has no tools"
    ):
        called_tools(settings(tmp_path, agents={"code": {"agent": "code"}}))
