"""Doctor's checks of episodes: whether they fit, whether they can be judged, and what a model judge costs.

The checks compare prompt, response and observations with the limits of the engine, the model and the reward.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from afm.agents import Limits
from afm.configuration import read_mapping, validated
from afm.datasets import Task
from afm.errors import DataError
from afm.findings import Finding, Level
from afm.memory_arithmetic import ModelShape
from afm.rewards import RewardSettings, load_reward
from afm.rewards.base import CountedTokens
from afm.rewards.judge import ModelJudge, WithoutEndpoint
from afm.rewards.judge_prompt import SCHEMA, Case, messages
from afm.rewards.text_match import gold_answers
from afm.rollout.routes import Route
from afm.settings import Environment
from afm.settings import load_settings as load_environment
from afm.terminal import plural
from afm.tools import Tool
from afm.tools.code import CodeTool
from verl_ext.algorithms import CRITIC_BUDGET, SHAPED
from verl_ext.rows import LONGEST, Rows
from verl_ext.settings import RlSettings
from verl_ext.sizes import RunSizes

Rewards = Mapping[str, RewardSettings]
"""Reward settings of each agent, by its key in ``agents:``. A single agent has the empty key."""

_CHARS_A_TOKEN = 4
"""Approximate characters per token of English text, to estimate how many observations fit in a response."""
_SHORTER = "lower data.max_prompt_length or the agent's limits.max_response_tokens"
_ENGINE_OVERRIDES = {"sglang": "json_model_override_args", "vllm": "hf_overrides"}
"""Key under ``rollout.engine_kwargs`` by which an engine overrides the configuration in the model's folder."""


def engine_findings(sizes: RunSizes, shape: ModelShape | None, config: Any) -> Iterator[Finding]:
    """Report whether the longest episode of any agent fits the engine, the model and the batches."""
    yield _model_len(sizes)
    if shape is not None and shape.max_positions:
        yield from _positions(sizes, shape, config)
    yield from _unread_keys(sizes, config)


def agent_findings(sizes: RunSizes, limits: Limits, reward: RewardSettings, config: Any) -> Iterator[Finding]:
    """Report whether the episodes of one agent fit its own limits and those of its reward."""
    own = replace(sizes, response=min(sizes.response, limits.max_response_tokens or sizes.response))
    yield from _observations(own, limits)
    yield from _overlong(own, limits, reward)
    yield from _shaping(own, reward, config)


def _model_len(sizes: RunSizes) -> Finding:
    """Compare an episode with the engine's limit. Without one, only the model's positions limit it (:func:`_positions`)."""
    sample = f"prompt {sizes.prompt:,} + response {sizes.response:,} = {sizes.longest:,} tokens"
    there = sizes.engine.model_len
    if there is None:
        return Finding(Level.OK, "context", f"{sample}; rollout.max_model_len is not set")
    if there < sizes.longest:
        text = f"{sample}, more than rollout.max_model_len ({there:,})"
        return Finding(Level.ERROR, "context", f"{text}; raise it, or {_SHORTER}")
    return Finding(Level.OK, "context", f"{sample} within rollout.max_model_len ({there:,})")


def _positions(sizes: RunSizes, shape: ModelShape, config: Any) -> Iterator[Finding]:
    """Report whether verl starts the engine, which rejects sequences longer than ``max_position_embeddings``."""
    needed = sizes.engine.model_len or sizes.longest
    trainer = _positions_in(config.actor_rollout_ref.model.override_config) or shape.max_positions
    key = _ENGINE_OVERRIDES.get(sizes.engine.name)
    overrides = config.actor_rollout_ref.rollout.engine_kwargs.get(sizes.engine.name) or {}
    engine = (_positions_in(overrides.get(key)) if key else None) or shape.max_positions
    text = f"sequences need {needed:,} positions, the model has {{:,}}"
    if trainer < needed:
        yield Finding(
            Level.ERROR,
            "positions",
            f"{text.format(trainer)}: verl will not start the engine; {_SHORTER}, or set "
            f"verl.actor_rollout_ref.model.+override_config.max_position_embeddings={needed}",
        )
    elif key and engine < needed:
        yield Finding(
            Level.ERROR,
            "positions",
            f"{text.format(engine)}, as {sizes.engine.name} reads it: override_config reaches only the trainer; also set "
            f"rollout.engine_kwargs.{sizes.engine.name}.{key} to {{max_position_embeddings: {needed}}}",
        )
    elif shape.max_positions < needed:
        message = f"{text.format(trainer)} by override, but {shape.max_positions:,} by its config.json: it was not trained on more"
        yield Finding(Level.WARNING, "positions", message)
    else:
        yield Finding(Level.OK, "positions", text.format(trainer))


def _positions_in(overrides: Any) -> int | None:
    """Return ``max_position_embeddings`` of a mapping or of JSON text, ``None`` without one."""
    if isinstance(overrides, str):
        try:
            overrides = json.loads(overrides)
        except ValueError:
            return None
    positions = overrides.get("max_position_embeddings") if hasattr(overrides, "get") else None
    return int(positions) if isinstance(positions, int) else None


def _unread_keys(sizes: RunSizes, config: Any) -> Iterator[Finding]:
    """Report keys of the critic that verl 0.9.1 does not read."""
    budget, split = config.critic.ppo_max_token_len_per_gpu, config.critic.ulysses_sequence_parallel_size
    if sizes.critic and split not in (1, sizes.critic_parallel):
        text = f"critic.ulysses_sequence_parallel_size={split} is not read"
        advice = f"set verl.critic.fsdp.ulysses_sequence_parallel_size={split} if you mean it"
        yield Finding(Level.WARNING, "splits", f"{text}; {advice}")
    if sizes.critic and budget != sizes.critic.tokens:
        text = f"critic.ppo_max_token_len_per_gpu={budget} is not read; batches are packed by"
        advice = f"set verl.critic.+{CRITIC_BUDGET}={budget} if you mean it"
        yield Finding(Level.WARNING, "context", f"{text} {CRITIC_BUDGET} ({sizes.critic.tokens:,}); {advice}")


def prompt_finding(rows: Rows, model: Path, limit: int) -> Finding | None:
    """Compare the longest prompts with ``data.max_prompt_length`` in tokens. ``None`` without a local tokenizer.

    Raises:
        ConfigError: The model's folder holds no usable tokenizer.
    """
    if not rows.longest or not (model / "tokenizer.json").is_file():
        return None
    from afm.models.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer.load(model)
    lengths = {name: len(tokenizer.encode_prompt(chat)) for name, chat in rows.longest}
    name, longest = max(lengths.items(), key=lambda item: item[1])
    text = f"the longest prompt has {longest:,} tokens (row {name!r}), data.max_prompt_length is {limit:,}"
    over = sum(length > limit for length in lengths.values())
    if not over:
        return Finding(Level.OK, "prompts", text)
    more = "at least " if over == len(lengths) == LONGEST else ""
    advice = f"{more}{over} rows are too long and would end the run (prompts are never cut): raise the limit or drop them"
    return Finding(Level.ERROR, "prompts", f"{text}; {advice}")


def _observations(sizes: RunSizes, limits: Limits) -> Iterator[Finding]:
    if not limits.max_turns:
        return
    each = limits.max_observation_chars // _CHARS_A_TOKEN
    full = sizes.response // max(1, each)
    text = (
        f"{plural(limits.max_turns, 'call')} with observations of at most {limits.max_observation_chars:,} characters (about "
        f"{each:,} tokens); the response has room for {plural(full, 'observation')} of full length"
    )
    low = full < min(2, limits.max_turns)
    advice = "; lower limits.max_observation_chars" if low else ""
    yield Finding(Level.WARNING if low else Level.OK, "observations", text + advice)
    if limits.max_turn_tokens and limits.max_turn_tokens > sizes.response:
        message = f"limits.max_turn_tokens is {limits.max_turn_tokens:,}, more than a whole response ({sizes.response:,})"
        yield Finding(Level.WARNING, "observations", message)


def _overlong(sizes: RunSizes, limits: Limits, reward: RewardSettings) -> Iterator[Finding]:
    if (long := reward.overlong) is None:
        return
    begins = long.max_tokens - long.buffer_tokens
    text = f"the penalty grows from {begins:,} to {long.max_tokens:,} tokens; a response has at most {sizes.response:,}"
    if begins >= sizes.response:
        advice = "it never applies: set rewards.overlong.max_tokens to the response's length"
        yield Finding(Level.ERROR, "overlong", f"{text}; {advice}")
    elif long.max_tokens != sizes.response:
        advice = "set rewards.overlong.max_tokens to the response's length"
        yield Finding(Level.WARNING, "overlong", f"{text}; {advice}")
    elif long.count is CountedTokens.AGENT and limits.max_turns != 0:
        advice = (
            "observations fill the response too, so few episodes reach it: set rewards.overlong.count=all"
        )
        yield Finding(Level.WARNING, "overlong", f"{text}, and only the agent's tokens are counted; {advice}")
    else:
        yield Finding(Level.OK, "overlong", text)


def _shaping(sizes: RunSizes, reward: RewardSettings, config: Any) -> Iterator[Finding]:
    """Report a filter that keeps groups of wrong answers with different lengths. Training on them teaches length."""
    metric = config.algorithm.filter_groups.metric
    if sizes.filtered and reward.overlong is not None and metric in SHAPED:
        text = (
            f"groups are filtered by {metric}, which includes the overlong penalty: a group of wrong answers"
        )
        advice = "set verl.algorithm.filter_groups.metric=acc"
        yield Finding(
            Level.WARNING, "filter", f"{text} of different lengths trains the model on length; {advice}"
        )


def sandbox_findings(
    settings: RlSettings, tools: Mapping[str, Tool], rows: Rows | None, rewards: Rewards | None, nodes: int
) -> Iterator[Finding]:
    """Report what runs programs on every node. Episodes are spread over all nodes, which are not checked from here."""
    users = [name for name, tool in tools.items() if isinstance(tool, CodeTool) and not tool.servers]
    if rows and any(not reward.code_tests.urls for reward in (rewards or {}).values()):
        users += ["code_tests"] if rows.scorers["code_tests"] else []
    users += ["harness"] if settings.harness and settings.harness.sandbox else []
    if users and nodes > 1:
        text = (
            f"programs of {' and '.join(users)} run on each of the {nodes} nodes, which all need bubblewrap"
        )
        yield Finding(Level.WARNING, "sandbox", f"{text}; run `afm sandbox check` on each (docs/install.md)")


_JUDGE_CHARS_A_TOKEN = 3
"""Characters per token, the same as in the judge's budget."""
_LIMITS = ("max_tokens", "max_completion_tokens")


def reward_settings(source: Path | dict[str, Any] | None) -> RewardSettings:
    """Return the reward settings of a run after a complete check.

    Raises:
        ConfigError: A setting is wrong. The message names file, key, value and expectation.
    """
    load_reward(source)
    label, data = read_mapping({} if source is None else source, "reward")
    return validated(RewardSettings, data, label)


def judge_findings(
    rows: Rows,
    sizes: RunSizes,
    reward: RewardSettings,
    environment: Environment,
    steps: int | None,
    share: float = 1.0,
) -> Iterator[Finding]:
    """Report the scorers of the rows, and for a model judge its endpoint, its key and the cost of a step.

    Args:
        share: Share of a step's samples that belongs to these rows, 0 to 1.
    """
    if rows.scorers:
        listed = ", ".join(f"{name} ({plural(count, 'row')})" for name, count in rows.scorers.most_common())
        yield Finding(Level.OK, "rewards", f"judged by {listed}; formula {reward.formula}")
    if not rows.scorers["judge"]:
        return
    judge = reward.judge
    url = judge.url or environment.grm_base_url
    if url is None:
        yield _unjudged(reward)
        return
    ModelJudge(judge)  # raises an error for an unusable address or key
    key = "" if environment.grm_api_key else "; GRM_API_KEY is not set, so requests have no key"
    model = judge.model or environment.grm_model_name
    yield Finding(Level.WARNING if key else Level.OK, "judge", f"{model} at {url}{key}")
    yield Finding(Level.OK, "judge", _cost(rows, sizes, reward, model, steps, share))


def judge_address(reward: RewardSettings, environment: Environment) -> str | None:
    """Return the address of the model judge, if there is one."""
    return reward.judge.url or environment.grm_base_url


def judge_addresses(
    routes: Iterable[Route], scorers: Mapping[str, Collection[str]] | None
) -> list[str | None]:
    """Return the address of each agent's model judge, if its rows need it or ``scorers`` (by agent) are unknown."""
    environment = load_environment()
    judged = [route for route in routes if scorers is None or "judge" in scorers[route.name]]
    return [judge_address(reward_settings(route.rewards), environment) for route in judged]


def _unjudged(reward: RewardSettings) -> Finding:
    advice = "set GRM_BASE_URL (GRM_API_KEY, GRM_MODEL_NAME), or rewards.judge.url"
    if reward.judge.without_endpoint is WithoutEndpoint.ABSTAIN:
        text = "no endpoint, so no sample of these rows gets a score and the first step ends the run"
        return Finding(Level.ERROR, "judge", f"{text}; {advice}")
    text = "no endpoint: exact match is used instead, which is stricter"
    return Finding(Level.WARNING, "judge", f"{text}; {advice}")


def _cost(
    rows: Rows, sizes: RunSizes, reward: RewardSettings, model: str, steps: int | None, share: float
) -> str:
    """Return the most calls and tokens for the samples of a step, without those that group filtering drops."""
    judge = reward.judge
    samples = round(share * sizes.episodes * rows.scorers["judge"] / rows.good)
    calls = samples * (2 if judge.control else 1)
    fields = judge.request_fields(model, SCHEMA)
    reply = next((int(fields[key]) for key in _LIMITS if key in fields), 0)
    asked = _prompt_tokens(rows.judged)
    tokens = calls * (asked + reply)
    text = (
        f"at most {plural(calls, 'call')} per step ({plural(samples, 'sample')}{', accepted ones twice' if judge.control else ''}) of about "
        f"{asked:,} + {reply:,} tokens: {tokens:,} tokens"
    )
    if steps:
        text += f", {tokens * steps:,} in {plural(steps, 'step')}"
    if (price := judge.price_per_million_tokens) is not None:
        text += f", {tokens * price / 1e6:,.2f} per step" + (
            f" and {tokens * steps * price / 1e6:,.2f} in total" if steps else ""
        )
        text += f" at {price:g} per million tokens"
    if sizes.filtered:
        text += "; groups that the filter drops add to this"
    return text + "; exact matches and cached verdicts cost nothing"


def _prompt_tokens(tasks: list[Task]) -> int:
    sizes = []
    for task in tasks:
        try:
            accepted = gold_answers(task.ground_truth)
        except DataError:
            continue
        case = Case(task.question, accepted, accepted[0])
        sizes.append(sum(len(message["content"]) for message in messages(case)) // _JUDGE_CHARS_A_TOKEN)
    return sum(sizes) // len(sizes) if sizes else 0
