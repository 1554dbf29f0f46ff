from dataclasses import replace
from typing import Any

import pytest

from afm.agents import Limits
from afm.planning import Finding, Level, model_shape
from afm.rewards import RewardSettings
from verl_ext.context import agent_findings, engine_findings
from verl_ext.workload import Placement, Workload

OmegaConf = pytest.importorskip("omegaconf").OmegaConf

SHAPE = model_shape("Qwen/Qwen2.5-7B")
assert SHAPE is not None
SHORT = replace(SHAPE, max_positions=900)
LIMITS = Limits(max_turns=4, max_observation_chars=400, max_response_tokens=900)


def found(
    load: Workload,
    *,
    limits: Limits = LIMITS,
    reward: dict[str, Any] | None = None,
    shape: Any = SHAPE,
    override: Any = None,
    engine_kwargs: Any = None,
    critic: Any = None,
    metric: str = "acc",
) -> dict[str, Finding]:
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "model": {"override_config": override or {}},
                "rollout": {"engine_kwargs": engine_kwargs or {"sglang": {}, "vllm": {}}},
            },
            "algorithm": {"filter_groups": {"enable": True, "metric": metric}},
            "critic": critic or {"ppo_max_token_len_per_gpu": 32768, "ulysses_sequence_parallel_size": 1},
        }
    )
    settings = RewardSettings.model_validate(reward or {})
    findings = [
        *engine_findings(load, shape, config),
        *agent_findings(load, limits, settings, config),
    ]
    worst = sorted(findings, key=lambda finding: [Level.OK, Level.WARNING, Level.ERROR].index(finding.level))
    return {finding.subject: finding for finding in worst}


def test_a_sample_fits_in_the_engine_and_the_model(workload: Workload) -> None:
    told = found(workload)
    assert {finding.level for finding in told.values()} == {Level.OK}
    expected = "prompt 100 + response 900 = 1,000 tokens within rollout.max_model_len (1,000)"
    assert told["context"].text == expected
    assert told["observations"].text.endswith(
        "(about 100 tokens); the response has room for 9 of full length"
    )


def test_an_engine_too_short_for_a_sample_is_an_error(workload: Workload) -> None:
    short = replace(workload, engine=replace(workload.engine, model_len=999))
    assert found(short)["context"].level is Level.ERROR
    assert "more than rollout.max_model_len (999); raise it" in found(short)["context"].text
    unset = replace(workload, engine=replace(workload.engine, model_len=None))
    assert "more than the model's positions" in found(unset, shape=SHORT)["context"].text


def test_verl_starts_no_engine_beyond_the_models_positions(workload: Workload) -> None:
    told = found(workload, shape=SHORT)["positions"]
    assert told.level is Level.ERROR
    assert "1,000 tokens against 900 positions of the model: verl will not start the engine" in told.text
    assert "override_config.max_position_embeddings=1000" in told.text


@pytest.mark.parametrize(
    ("engine", "key", "value"),
    [
        ("sglang", "json_model_override_args", '{"max_position_embeddings": 1000}'),
        ("vllm", "hf_overrides", {"max_position_embeddings": 1000}),
    ],
)
def test_trainer_and_engine_are_both_told_of_more_positions(
    workload: Workload, engine: str, key: str, value: Any
) -> None:
    load = replace(workload, engine=replace(workload.engine, name=engine))
    override = {"max_position_embeddings": 1000}
    half = found(load, shape=SHORT, override=override)["positions"]
    assert half.level is Level.ERROR
    assert f"set rollout.engine_kwargs.{engine}.{key} to" in half.text
    both = found(load, shape=SHORT, override=override, engine_kwargs={engine: {key: value}})["positions"]
    assert both.level is Level.WARNING
    assert "900 by its config.json: unseen in its training" in both.text


def test_every_pass_has_room_for_the_longest_sample(workload: Workload) -> None:
    told = found(replace(workload, log_prob_tokens=499))["context"]
    assert told.level is Level.ERROR
    assert "rollout.log_prob_max_token_len_per_gpu: 499 tokens x 2 GPUs, fewer than" in told.text
    assert told.text.endswith("raise it to 500")
    place = Placement(999, 8, moves_parameters=True, moves_optimizer=True, stays_on_cpu=False)
    assert (
        "ref.log_prob_max_token_len_per_gpu"
        in found(replace(workload, reference=replace(place, tokens=400)))["context"].text
    )
    critic = {"ppo_max_token_len_per_gpu": 999, "ulysses_sequence_parallel_size": 1}
    assert (
        "critic.ppo_infer_max_token_len_per_gpu: 999 tokens x 1 GPUs"
        in found(replace(workload, critic=place), critic=critic)["context"].text
    )


def test_a_key_of_the_critic_that_verl_does_not_read_is_told(workload: Workload) -> None:
    place = Placement(32768, 8, moves_parameters=True, moves_optimizer=True, stays_on_cpu=False)
    critic = {"ppo_max_token_len_per_gpu": 40960, "ulysses_sequence_parallel_size": 1}
    told = found(replace(workload, critic=place), critic=critic)["context"]
    assert told.level is Level.WARNING
    assert "critic.ppo_max_token_len_per_gpu=40960 is not read" in told.text


def test_observations_leave_room_for_the_agent(workload: Workload) -> None:
    long = found(workload, limits=LIMITS.model_copy(update={"max_observation_chars": 3600}))["observations"]
    assert long.level is Level.WARNING
    assert "room for 1 of full length; lower limits.max_observation_chars" in long.text
    turn = found(workload, limits=LIMITS.model_copy(update={"max_turn_tokens": 901}))["observations"]
    assert "limits.max_turn_tokens is 901, more than a response has (900)" in turn.text


@pytest.mark.parametrize(
    ("most", "buffer", "level", "told"),
    [
        (900, 100, Level.OK, "from 800 to 900 tokens; a response has 900"),
        (1000, 200, Level.WARNING, "from 800 to 1,000 tokens"),
        (500, 100, Level.WARNING, "from 400 to 500 tokens"),
        (1000, 100, Level.ERROR, "it never applies"),
    ],
)
def test_the_overlong_buffer_lies_in_the_response(
    workload: Workload, most: int, buffer: int, level: Level, told: str
) -> None:
    reward = {
        "formula": "correct + overlong",
        "overlong": {"max_tokens": most, "buffer_tokens": buffer, "count": "all"},
    }
    finding = found(workload, reward=reward)["overlong"]
    assert (finding.level, told in finding.text) == (level, True), finding.text


def test_a_penalty_that_counts_the_agents_tokens_alone_is_seldom_reached(workload: Workload) -> None:
    reward = {
        "formula": "correct + overlong",
        "overlong": {"max_tokens": 900, "buffer_tokens": 100, "count": "agent"},
    }
    finding = found(workload, reward=reward)["overlong"]
    assert finding.level is Level.WARNING
    assert finding.text.endswith("so few episodes reach it: set rewards.overlong.count=all")
    without_calls = LIMITS.model_copy(update={"max_turns": 0})
    assert found(workload, reward=reward, limits=without_calls)["overlong"].level is Level.OK


@pytest.mark.parametrize(
    ("metric", "formula", "warned"),
    [
        ("score", "correct + overlong", True),
        ("overlong", "correct + overlong", True),
        ("acc", "correct + overlong", False),
        ("score", "correct", False),
    ],
)
def test_groups_filtered_by_shaping_are_told(
    workload: Workload, metric: str, formula: str, warned: bool
) -> None:
    long = {"overlong": {"max_tokens": 900, "buffer_tokens": 100, "count": "all"}}
    reward = {"formula": formula} | (long if "overlong" in formula else {})
    told = found(workload, reward=reward, metric=metric).get("filter")
    assert (told is not None) == warned
    if told is not None:
        assert told.level is Level.WARNING
        assert told.text.endswith("set verl.algorithm.filter_groups.metric=acc")
    off = found(replace(workload, filtered=False), reward=reward, metric=metric)
    assert "filter" not in off
