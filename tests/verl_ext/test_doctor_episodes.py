from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from afm.agents import Limits
from afm.datasets import Task
from afm.errors import ConfigError
from afm.findings import Finding, Level
from afm.memory_arithmetic import model_shape
from afm.rewards import RewardSettings
from afm.rewards.judge_prompt import Case, messages
from afm.settings import Environment
from verl_ext.doctor_episodes import agent_findings, engine_findings, judge_findings, reward_settings
from verl_ext.rows import Rows
from verl_ext.sizes import Placement, RunSizes

OmegaConf = pytest.importorskip("omegaconf").OmegaConf

SHAPE = model_shape("Qwen/Qwen2.5-7B")
assert SHAPE is not None
SHORT = replace(SHAPE, max_positions=900)
LIMITS = Limits(max_turns=4, max_observation_chars=400, max_response_tokens=900)


def episode_report(
    sizes: RunSizes,
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
        *engine_findings(sizes, shape, config),
        *agent_findings(sizes, limits, settings, config),
    ]
    worst = sorted(findings, key=lambda finding: [Level.OK, Level.WARNING, Level.ERROR].index(finding.level))
    return {finding.subject: finding for finding in worst}


def test_a_sample_fits_in_the_engine_and_the_model(sizes: RunSizes) -> None:
    told = episode_report(sizes)
    assert {finding.level for finding in told.values()} == {Level.OK}
    expected = "prompt 100 + response 900 = 1,000 tokens within rollout.max_model_len (1,000)"
    assert told["context"].text == expected
    assert told["observations"].text.endswith(
        "(about 100 tokens); the response has room for 9 of full length"
    )


def engine(sizes: RunSizes, **changes: Any) -> RunSizes:
    return replace(sizes, engine=replace(sizes.engine, **changes))


PLACE = Placement(32768, 8, moves_parameters=True, moves_optimizer=True, stays_on_cpu=False)


@pytest.mark.parametrize(
    ("change", "options", "subject", "level", "text"),
    [
        (lambda s: engine(s, model_len=999), {}, "context", Level.ERROR, "more than rollout.max_model_len (999); raise it"),
        (lambda s: engine(s, model_len=None), {"shape": SHORT}, "context", Level.ERROR, "more than the model's positions"),
        (lambda s: s, {"shape": SHORT}, "positions", Level.ERROR,
         "1,000 tokens against 900 positions of the model: verl will not start the engine; shorten them, or set "
         "verl.actor_rollout_ref.model.+override_config.max_position_embeddings=1000"),
        (lambda s: replace(s, critic=PLACE), {"critic": {"ppo_max_token_len_per_gpu": 40960}}, "context", Level.WARNING,
         "critic.ppo_max_token_len_per_gpu=40960 is not read"),
        (lambda s: s, {"limits": LIMITS.model_copy(update={"max_observation_chars": 3600})}, "observations", Level.WARNING,
         "room for 1 of full length; lower limits.max_observation_chars"),
        (lambda s: s, {"limits": LIMITS.model_copy(update={"max_turn_tokens": 901})}, "observations", Level.WARNING,
         "limits.max_turn_tokens is 901, more than a response has (900)"),
    ],
)  # fmt: skip
def test_an_episode_that_does_not_fit_is_told(
    sizes: RunSizes, change: Any, options: dict[str, Any], subject: str, level: Level, text: str
) -> None:
    finding = episode_report(change(sizes), **options)[subject]
    assert finding.level is level
    assert text in finding.text


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("sglang", "json_model_override_args", '{"max_position_embeddings": 1000}'),
        ("vllm", "hf_overrides", {"max_position_embeddings": 1000}),
    ],
)
def test_trainer_and_engine_are_both_told_of_more_positions(
    sizes: RunSizes, name: str, key: str, value: Any
) -> None:
    sizes = engine(sizes, name=name)
    override = {"max_position_embeddings": 1000}
    half = episode_report(sizes, shape=SHORT, override=override)["positions"]
    assert half.level is Level.ERROR
    assert f"set rollout.engine_kwargs.{name}.{key} to" in half.text
    both = episode_report(sizes, shape=SHORT, override=override, engine_kwargs={name: {key: value}})[
        "positions"
    ]
    assert both.level is Level.WARNING
    assert "900 by its config.json: unseen in its training" in both.text


@pytest.mark.parametrize(
    ("most", "buffer", "count", "turns", "level", "told"),
    [
        (900, 100, "all", 4, Level.OK, "from 800 to 900 tokens; a response has 900"),
        (1000, 200, "all", 4, Level.WARNING, "from 800 to 1,000 tokens"),
        (500, 100, "all", 4, Level.WARNING, "from 400 to 500 tokens"),
        (1000, 100, "all", 4, Level.ERROR, "it never applies"),
        (900, 100, "agent", 4, Level.WARNING, "so few episodes reach it: set rewards.overlong.count=all"),
        (
            900,
            100,
            "agent",
            0,
            Level.OK,
            "from 800 to 900 tokens",
        ),  # without calls there is nothing else to count
    ],
)
def test_the_overlong_buffer_lies_in_the_response(
    sizes: RunSizes, most: int, buffer: int, count: str, turns: int, level: Level, told: str
) -> None:
    long = {"max_tokens": most, "buffer_tokens": buffer, "count": count}
    reward = {"formula": "correct + overlong", "overlong": long}
    limits = LIMITS.model_copy(update={"max_turns": turns})
    finding = episode_report(sizes, reward=reward, limits=limits)["overlong"]
    assert (finding.level, told in finding.text) == (level, True), finding.text


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
    sizes: RunSizes, metric: str, formula: str, warned: bool
) -> None:
    long = {"overlong": {"max_tokens": 900, "buffer_tokens": 100, "count": "all"}}
    reward = {"formula": formula} | (long if "overlong" in formula else {})
    told = episode_report(sizes, reward=reward, metric=metric).get("filter")
    assert (told is not None) == warned
    if told is not None:
        assert told.level is Level.WARNING
        assert told.text.endswith("set verl.algorithm.filter_groups.metric=acc")
    off = episode_report(replace(sizes, filtered=False), reward=reward, metric=metric)
    assert "filter" not in off


TASK = Task(id="1", question="Who?", ground_truth=["A", "B"], data_source="search")
URL = "http://127.0.0.1:1/v1"


def judge_report(
    sizes: RunSizes, judge: dict[str, Any], rows: Rows | None = None, **environment: Any
) -> list[Finding]:
    known = rows or Rows(good=4, scorers=Counter(judge=2, math=2), judged=[TASK])
    settings = reward_settings({"judge": judge})
    return list(judge_findings(known, sizes, settings, Environment(**environment), 10))


def test_the_cost_of_a_step_is_that_of_its_judged_samples(sizes: RunSizes) -> None:
    told = judge_report(replace(sizes, filtered=False), {"url": URL}, grm_api_key="k")[-1].text
    asked = sum(len(part["content"]) for part in messages(Case("Who?", ("A", "B"), "A"))) // 3
    # half of 16 x 8 samples, accepted ones twice, a reply of at most 512 tokens
    tokens = 2 * 64 * (asked + 512)
    assert told.startswith(
        f"at most 128 calls a step (64 samples, accepted ones twice) of about {asked} + 512 tokens: "
        f"{tokens:,} tokens, {tokens * 10:,} in 10 steps; exact matches"
    )
    once = judge_report(
        sizes, {"url": URL, "control": False, "request": {"max_tokens": 100}}, grm_api_key="k"
    )
    assert f"at most 64 calls a step (64 samples) of about {asked} + 100 tokens" in once[-1].text
    assert "groups that are filtered out come on top" in once[-1].text


def test_money_is_told_only_when_a_price_is(sizes: RunSizes) -> None:
    assert " a million" not in judge_report(sizes, {"url": URL}, grm_api_key="k")[-1].text
    priced = judge_report(sizes, {"url": URL, "price_per_million_tokens": 1e6}, grm_api_key="k")[-1].text
    tokens = int(priced.split(" tokens: ")[1].split(" ")[0].replace(",", ""))
    assert f"{tokens:,}.00 a step and {tokens * 10:,}.00 in all at 1e+06 a million" in priced
    with pytest.raises(ConfigError, match=r"price_per_million_tokens: got -1"):
        reward_settings({"judge": {"price_per_million_tokens": -1}})


def test_a_judge_that_nobody_is_ends_a_run_or_is_stood_in_for(sizes: RunSizes) -> None:
    abstains = judge_report(sizes, {"without_endpoint": "abstain"})[-1]
    assert (abstains.level, abstains.subject) == (Level.ERROR, "judge")
    assert "no sample of these rows has a score" in abstains.text
    exact = judge_report(sizes, {})[-1]
    assert (exact.level, "exact match stands in" in exact.text) == (Level.WARNING, True)


def test_a_missing_key_is_told(sizes: RunSizes) -> None:
    told = judge_report(sizes, {"url": URL})[1]
    assert (told.level, "GRM_API_KEY is not set" in told.text) == (Level.WARNING, True)
    assert judge_report(sizes, {"url": URL}, grm_api_key="k")[1].text == f"gpt-4.1-mini at {URL}"


def test_rows_that_no_model_judges_cost_nothing(sizes: RunSizes) -> None:
    told = judge_report(sizes, {}, Rows(good=3, scorers=Counter(math=3)))
    assert [finding.text for finding in told] == ["judged by math (3 rows); formula correct * format"]
