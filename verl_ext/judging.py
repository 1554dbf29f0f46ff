"""What judges a run's episodes: whether it can, and what a model judge costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from afm.configuration import read_mapping, validated
from afm.datasets import Task
from afm.errors import DataError
from afm.planning import Finding, Level
from afm.rewards import RewardSettings, load_reward
from afm.rewards.gold import gold_answers
from afm.rewards.judge import ModelJudge, WithoutEndpoint
from afm.rewards.judge_prompt import SCHEMA, Case, messages
from afm.settings import Environment
from verl_ext.rows import Rows
from verl_ext.workload import Workload

_CHARS_A_TOKEN = 3
"""As the judge's own budget counts."""
_LIMITS = ("max_tokens", "max_completion_tokens")


def reward_settings(source: Path | dict[str, Any] | None) -> RewardSettings:
    """The reward file of a run, checked as a whole.

    Raises:
        ConfigError: Names the file, the key path, the value and what was expected.
    """
    load_reward(source)
    label, data = read_mapping({} if source is None else source, "reward")
    return validated(RewardSettings, data, label)


def judge_findings(
    rows: Rows,
    load: Workload,
    reward: RewardSettings,
    environment: Environment,
    steps: int | None,
    share: float = 1.0,
) -> Iterator[Finding]:
    """Scorers of the rows; for a model judge its endpoint, its key and the cost of a step.

    Args:
        share: Of all samples of a step, what belongs to these rows.
    """
    if rows.scorers:
        listed = ", ".join(f"{name} ({count:,} rows)" for name, count in rows.scorers.most_common())
        yield Finding(Level.OK, "rewards", f"judged by {listed}; formula {reward.formula}")
    if not rows.scorers["judge"]:
        return
    judge = reward.judge
    url = judge.url or environment.grm_base_url
    if url is None:
        yield _unjudged(reward)
        return
    ModelJudge(judge)  # an address or a key that cannot be used is an error
    key = "" if environment.grm_api_key else "; GRM_API_KEY is not set, so it is asked without a key"
    model = judge.model or environment.grm_model_name
    yield Finding(Level.WARNING if key else Level.OK, "judge", f"{model} at {url}{key}")
    yield Finding(Level.OK, "judge", _cost(rows, load, reward, model, steps, share))


def judge_address(reward: RewardSettings, environment: Environment) -> str | None:
    """Where the model judge is, if there is one."""
    return reward.judge.url or environment.grm_base_url


def _unjudged(reward: RewardSettings) -> Finding:
    advice = "set GRM_BASE_URL (GRM_API_KEY, GRM_MODEL_NAME), or rewards.judge.url"
    if reward.judge.without_endpoint is WithoutEndpoint.ABSTAIN:
        text = "no endpoint, so no sample of these rows has a score and the first step ends the run"
        return Finding(Level.ERROR, "judge", f"{text}; {advice}")
    text = "no endpoint: exact match stands in, which is harsher"
    return Finding(Level.WARNING, "judge", f"{text}; {advice}")


def _cost(
    rows: Rows, load: Workload, reward: RewardSettings, model: str, steps: int | None, share: float
) -> str:
    """Calls and tokens at most, of the samples that are trained on; those that group filtering drops come on top."""
    judge = reward.judge
    samples = round(share * load.episodes * rows.scorers["judge"] / rows.good)
    calls = samples * (2 if judge.control else 1)
    fields = judge.request_fields(model, SCHEMA)
    reply = next((int(fields[key]) for key in _LIMITS if key in fields), 0)
    asked = _prompt_tokens(rows.judged)
    tokens = calls * (asked + reply)
    text = (
        f"at most {calls:,} calls a step ({samples:,} samples{', accepted ones twice' if judge.control else ''}) of about "
        f"{asked:,} + {reply:,} tokens: {tokens:,} tokens"
    )
    if steps:
        text += f", {tokens * steps:,} in {steps:,} steps"
    if (price := judge.price_per_million_tokens) is not None:
        text += f", {tokens * price / 1e6:,.2f} a step" + (
            f" and {tokens * steps * price / 1e6:,.2f} in all" if steps else ""
        )
        text += f" at {price:g} a million"
    if load.filtered:
        text += "; groups that are filtered out come on top"
    return text + "; exact matches and cached verdicts cost nothing"


def _prompt_tokens(tasks: list[Task]) -> int:
    sizes = []
    for task in tasks:
        try:
            accepted = gold_answers(task.ground_truth)
        except DataError:
            continue
        case = Case(task.question, accepted, accepted[0])
        sizes.append(sum(len(message["content"]) for message in messages(case)) // _CHARS_A_TOKEN)
    return sum(sizes) // len(sizes) if sizes else 0
