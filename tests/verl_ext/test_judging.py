from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from afm.datasets import Task
from afm.errors import ConfigError
from afm.planning import Finding, Level
from afm.rewards.judge_prompt import Case, messages
from afm.settings import Environment
from verl_ext.judging import judge_findings, reward_settings
from verl_ext.rows import Rows
from verl_ext.workload import Workload

TASK = Task(id="1", question="Who?", ground_truth=["A", "B"], data_source="search")
URL = "http://127.0.0.1:1/v1"


def found(
    load: Workload, judge: dict[str, Any], rows: Rows | None = None, **environment: Any
) -> list[Finding]:
    known = rows or Rows(good=4, scorers=Counter(judge=2, math=2), judged=[TASK])
    settings = reward_settings({"judge": judge})
    return list(judge_findings(known, load, settings, Environment(**environment), 10))


def test_the_cost_of_a_step_is_that_of_its_judged_samples(workload: Workload) -> None:
    told = found(replace(workload, filtered=False), {"url": URL}, grm_api_key="k")[-1].text
    asked = sum(len(part["content"]) for part in messages(Case("Who?", ("A", "B"), "A"))) // 3
    # half of 16 x 8 samples, accepted ones twice, a reply of at most 512 tokens
    tokens = 2 * 64 * (asked + 512)
    assert told.startswith(
        f"at most 128 calls a step (64 samples, accepted ones twice) of about {asked} + 512 tokens: "
        f"{tokens:,} tokens, {tokens * 10:,} in 10 steps; exact matches"
    )
    once = found(workload, {"url": URL, "control": False, "request": {"max_tokens": 100}}, grm_api_key="k")
    assert f"at most 64 calls a step (64 samples) of about {asked} + 100 tokens" in once[-1].text
    assert "groups that are filtered out come on top" in once[-1].text


def test_money_is_told_only_when_a_price_is(workload: Workload) -> None:
    assert " a million" not in found(workload, {"url": URL}, grm_api_key="k")[-1].text
    priced = found(workload, {"url": URL, "price_per_million_tokens": 1e6}, grm_api_key="k")[-1].text
    tokens = int(priced.split(" tokens: ")[1].split(" ")[0].replace(",", ""))
    assert f"{tokens:,}.00 a step and {tokens * 10:,}.00 in all at 1e+06 a million" in priced
    with pytest.raises(ConfigError, match=r"price_per_million_tokens: got -1"):
        reward_settings({"judge": {"price_per_million_tokens": -1}})


def test_a_judge_that_nobody_is_ends_a_run_or_is_stood_in_for(workload: Workload) -> None:
    abstains = found(workload, {"without_endpoint": "abstain"})[-1]
    assert (abstains.level, abstains.subject) == (Level.ERROR, "judge")
    assert "no sample of these rows has a score" in abstains.text
    exact = found(workload, {})[-1]
    assert (exact.level, "exact match stands in" in exact.text) == (Level.WARNING, True)


def test_a_missing_key_is_told(workload: Workload) -> None:
    told = found(workload, {"url": URL})[1]
    assert (told.level, "GRM_API_KEY is not set" in told.text) == (Level.WARNING, True)
    assert found(workload, {"url": URL}, grm_api_key="k")[1].text == f"gpt-4.1-mini at {URL}"


def test_rows_that_no_model_judges_cost_nothing(workload: Workload) -> None:
    told = found(workload, {}, Rows(good=3, scorers=Counter(math=3)))
    assert [finding.text for finding in told] == ["judged by math (3 rows); formula correct * format"]
