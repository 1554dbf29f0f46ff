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
    metric: str = "acc",
    **config: Any,
) -> dict[str, Finding]:
    """Return the worst finding of each subject. ``config`` holds the changed sections of verl's configuration."""
    usual = {
        "actor_rollout_ref": {
            "model": {"override_config": {}},
            "rollout": {"engine_kwargs": {"sglang": {}, "vllm": {}}},
        },
        "algorithm": {"filter_groups": {"enable": True, "metric": metric}},
        "critic": {"ppo_max_token_len_per_gpu": 32768, "ulysses_sequence_parallel_size": 1},
    }
    merged = OmegaConf.merge(usual, config)
    settings = RewardSettings.model_validate(reward or {})
    findings = [*engine_findings(sizes, shape, merged), *agent_findings(sizes, limits, settings, merged)]
    worst = sorted(findings, key=lambda finding: [Level.OK, Level.WARNING, Level.ERROR].index(finding.level))
    return {finding.subject: finding for finding in worst}


def test_a_sample_fits_in_the_engine_and_the_model(sizes: RunSizes) -> None:
    findings = episode_report(sizes)
    assert {finding.level for finding in findings.values()} == {Level.OK}
    expected = "prompt 100 + response 900 = 1,000 tokens within rollout.max_model_len (1,000)"
    assert findings["context"].text == expected
    assert findings["observations"].text.endswith(
        "(about 100 tokens); the response has room for 9 observations of full length"
    )


def engine(sizes: RunSizes, **changes: Any) -> RunSizes:
    return replace(sizes, engine=replace(sizes.engine, **changes))


PLACE = Placement(32768, 8, moves_parameters=True, moves_optimizer=True, stays_on_cpu=False)


@pytest.mark.parametrize(
    ("change", "options", "subject", "level", "text"),
    [
        (lambda s: engine(s, model_len=999), {}, "context", Level.ERROR, "more than rollout.max_model_len (999); raise it"),
        (lambda s: s, {"shape": SHORT}, "positions", Level.ERROR,
         "sequences need 1,000 positions, the model has 900: verl will not start the engine; lower data.max_prompt_length "
         "or the agent's limits.max_response_tokens, or set "
         "verl.actor_rollout_ref.model.+override_config.max_position_embeddings=1000"),
        (lambda s: replace(s, critic=PLACE), {"critic": {"ppo_max_token_len_per_gpu": 40960}}, "context", Level.WARNING,
         "critic.ppo_max_token_len_per_gpu=40960 is not read"),
        (lambda s: replace(s, critic=PLACE), {"critic": {"ulysses_sequence_parallel_size": 2}}, "splits", Level.WARNING,
         "critic.ulysses_sequence_parallel_size=2 is not read; set verl.critic.fsdp.ulysses_sequence_parallel_size=2"),
        (lambda s: s, {"limits": LIMITS.model_copy(update={"max_observation_chars": 3600})}, "observations", Level.WARNING,
         "room for 1 observation of full length; lower limits.max_observation_chars"),
        (lambda s: s, {"limits": LIMITS.model_copy(update={"max_turn_tokens": 901})}, "observations", Level.WARNING,
         "limits.max_turn_tokens is 901, more than a whole response (900)"),
    ],
)  # fmt: skip
def test_an_episode_that_does_not_fit_is_told(
    sizes: RunSizes, change: Any, options: dict[str, Any], subject: str, level: Level, text: str
) -> None:
    finding = episode_report(change(sizes), **options)[subject]
    assert finding.level is level
    assert text in finding.text


def test_an_episode_longer_than_the_model_is_one_error(sizes: RunSizes) -> None:
    report = episode_report(engine(sizes, model_len=None), shape=SHORT)
    assert [f.subject for f in report.values() if f.level is Level.ERROR] == ["positions"]
    assert (
        report["context"].text == "prompt 100 + response 900 = 1,000 tokens; rollout.max_model_len is not set"
    )


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
    def positions(engine_kwargs: dict[str, Any]) -> Finding:
        model = {"override_config": {"max_position_embeddings": 1000}}
        actor = {"model": model, "rollout": {"engine_kwargs": {name: engine_kwargs}}}
        report = episode_report(engine(sizes, name=name), shape=SHORT, actor_rollout_ref=actor)
        return report["positions"]

    half, both = positions({}), positions({key: value})
    assert (half.level, both.level) == (Level.ERROR, Level.WARNING)
    assert f"set rollout.engine_kwargs.{name}.{key} to" in half.text
    assert "900 by its config.json: it was not trained on more" in both.text


@pytest.mark.parametrize(
    ("most", "buffer", "count", "turns", "level", "text"),
    [
        (900, 100, "all", 4, Level.OK, "from 800 to 900 tokens; a response has at most 900"),
        (1000, 200, "all", 4, Level.WARNING, "from 800 to 1,000 tokens"),
        (500, 100, "all", 4, Level.WARNING, "from 400 to 500 tokens"),
        (1000, 100, "all", 4, Level.ERROR, "it never applies"),
        (900, 100, "agent", 4, Level.WARNING, "so few episodes reach it: set rewards.overlong.count=all"),
        (900, 100, "agent", 0, Level.OK, "from 800 to 900 tokens"),  # nothing but the agent's to count
    ],
)
def test_the_overlong_buffer_lies_in_the_response(
    sizes: RunSizes, most: int, buffer: int, count: str, turns: int, level: Level, text: str
) -> None:
    long = {"max_tokens": most, "buffer_tokens": buffer, "count": count}
    reward = {"formula": "correct + overlong", "overlong": long}
    limits = LIMITS.model_copy(update={"max_turns": turns})
    finding = episode_report(sizes, reward=reward, limits=limits)["overlong"]
    assert (finding.level, text in finding.text) == (level, True), finding.text


LONG = {"max_tokens": 900, "buffer_tokens": 100, "count": "all"}
SHAPED = {"formula": "correct + overlong", "overlong": LONG}


def test_groups_filtered_by_shaping_are_told_and_those_by_correctness_are_not(sizes: RunSizes) -> None:
    for metric in ("score", "overlong"):
        finding = episode_report(sizes, reward=SHAPED, metric=metric)["filter"]
        assert finding.level is Level.WARNING
        assert finding.text.endswith("set verl.algorithm.filter_groups.metric=acc")
        assert "filter" not in episode_report(replace(sizes, filtered=False), reward=SHAPED, metric=metric)
    assert "filter" not in episode_report(sizes, reward=SHAPED, metric="acc")
    assert "filter" not in episode_report(sizes, reward={"formula": "correct"}, metric="score")


TASK = Task(id="1", question="Who?", ground_truth=["A", "B"], data_source="search")
URL = "http://127.0.0.1:1/v1"


def judge_report(sizes: RunSizes, *rows: Rows, key: str | None = "k", **judge: Any) -> list[Finding]:
    known = rows[0] if rows else Rows(good=4, scorers=Counter(judge=2, math=2), judged=[TASK])
    settings = reward_settings({"judge": judge})
    return list(judge_findings(known, sizes, settings, Environment(grm_api_key=key), 10))


def test_the_cost_of_a_step_is_that_of_its_judged_samples(sizes: RunSizes) -> None:
    text = judge_report(replace(sizes, filtered=False), url=URL)[-1].text
    asked = sum(len(part["content"]) for part in messages(Case("Who?", ("A", "B"), "A"))) // 3
    # half of 16 x 8 samples, accepted ones twice, a reply of at most 512 tokens
    tokens = 2 * 64 * (asked + 512)
    assert text.startswith(
        f"at most 128 calls per step (64 samples, accepted ones twice) of about {asked} + 512 tokens: "
        f"{tokens:,} tokens, {tokens * 10:,} in 10 steps; exact matches"
    )
    assert " per million" not in text
    once = judge_report(sizes, url=URL, control=False, request={"max_tokens": 100})[-1].text
    assert f"at most 64 calls per step (64 samples) of about {asked} + 100 tokens" in once
    assert "groups that the filter drops add to this" in once
    priced = judge_report(sizes, url=URL, price_per_million_tokens=1e6)[-1].text
    assert f"{tokens:,}.00 per step and {tokens * 10:,}.00 in total at 1e+06 per million tokens" in priced
    with pytest.raises(ConfigError, match=r"price_per_million_tokens: got -1"):
        reward_settings({"judge": {"price_per_million_tokens": -1}})


@pytest.mark.parametrize(
    ("judge", "at", "level", "text"),
    [
        ({"without_endpoint": "abstain"}, -1, Level.ERROR, "no sample of these rows gets a score"),
        ({}, -1, Level.WARNING, "exact match is used instead"),
        ({"url": URL, "key": None}, 1, Level.WARNING, "GRM_API_KEY is not set"),
        ({"url": URL}, 1, Level.OK, f"gpt-4.1-mini at {URL}"),
    ],
)
def test_a_judge_without_an_address_or_a_key_is_told(
    sizes: RunSizes, judge: dict[str, Any], at: int, level: Level, text: str
) -> None:
    finding = judge_report(sizes, **judge)[at]
    assert (finding.level, text in finding.text) == (level, True), finding.text


def test_rows_that_no_model_judges_cost_nothing(sizes: RunSizes) -> None:
    findings = judge_report(sizes, Rows(good=3, scorers=Counter(math=3)), key=None)
    assert [finding.text for finding in findings] == ["judged by math (3 rows); formula correct * format"]
