"""``afm data queries``: the questions that are worth training on."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.cli.options import TrustOption
from afm.errors import ConfigError, DataError, UsageError

if TYPE_CHECKING:
    from afm.agents import AgentSpec
    from afm.datasets import Task
    from afm.distill.queries.askers import QuestionAsker
    from afm.distill.queries.sampling import OnSample, QueryConfig
    from afm.distill.queries.select import QuerySummary
    from afm.rewards import Reward
    from afm.terminal import ProgressView
    from afm.tools import Tool

_NAMED = 5


def queries(
    config: Annotated[
        Path,
        typer.Argument(
            help="YAML of the selection, for example configs/queries/qa.yaml.", exists=True, dir_okay=False
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="For example tasks=nq.jsonl model=DIR_OR_URL output_dir=DIR target=1000.",
        ),
    ] = None,
    trust: TrustOption = False,
) -> None:
    """Select questions for reinforcement learning: drop those that a model answers too often already.

    The command samples answers and keeps a question by the share of right ones. It writes samples.jsonl, kept.jsonl and
    dropped.jsonl into output_dir. A server (http://HOST:PORT/v1, key in AFM_MODEL_API_KEY) answers by chat completions, or
    with `tokenizer` by token ids. If interrupted, run the same command again to resume.
    """
    from afm.distill.queries.sampling import read_selection
    from afm.terminal import ProgressView

    settings = read_selection(config, overrides or [])
    view = ProgressView()
    summary = asyncio.run(_run(settings, partial(view.update, "samples")))
    _print_summary(summary, view, compared=bool(settings.sft) or settings.with_tools)


def _print_summary(summary: QuerySummary, view: ProgressView, *, compared: bool) -> None:
    view.line(
        f"{summary.path}: {summary.kept} of {summary.tasks} questions kept, {summary.sampled} samples taken"
    )
    if not compared:
        print("  without `sft` nothing was compared with the SFT data")
    if summary.resumed:
        print(f"  samples of earlier starts: {summary.resumed}")
    for reason, count in sorted(summary.dropped.items()):
        print(f"  dropped: {count} {reason}")
    for name, reason in list(summary.unsampled.items())[:_NAMED]:
        print(f"  cannot be sampled: {name!r}: {reason}")


async def _run(settings: QueryConfig, show: OnSample) -> QuerySummary:
    from afm.datasets import read_task_files
    from afm.distill.queries.select import known_questions, select_queries
    from afm.rewards import load_reward

    tasks = _of_ability(list(read_task_files(settings.tasks)), settings.ability)
    known = known_questions(settings.sft)
    reward = load_reward(settings.rewards)
    try:
        asker = _open_asker(settings, reward)
        try:
            return await select_queries(
                tasks,
                asker,
                settings.output_dir,
                settings,
                known=known,
                inputs=[*settings.tasks, *settings.sft],
                on_sample=show,
            )
        finally:
            await asker.close()
    finally:
        await reward.close()


def _of_ability(tasks: list[Task], ability: str | None) -> list[Task]:
    matches = tasks if ability is None else [task for task in tasks if task.ability == ability]
    if not matches:
        others = ", ".join(sorted({repr(task.ability) for task in tasks})) or "no rows"
        raise DataError(f"no row has the ability {ability!r}, only {others}; choose with ability=NAME")
    return matches


def _open_asker(settings: QueryConfig, reward: Reward) -> QuestionAsker:
    """Loads the model, or connects to it."""
    from afm.agents import holds_model, load_agent, model_folder
    from afm.agents.load import without_tools
    from afm.distill.queries.askers import EpisodeAsker, by_exact_match, by_reward
    from afm.models import SamplingParams, load_model

    declared = load_agent(settings.agent)
    served = "://" in settings.model
    if served and settings.tokenizer is None:
        return _chat_asker(settings, without_tools(declared))
    if not served and not holds_model(model_folder(settings.model)):
        raise UsageError(
            f"model: {settings.model} holds no model (config.json); expected a model's folder, a run, or http://HOST:PORT/v1"
        )
    spec = declared if settings.with_tools else without_tools(declared)
    tools = _load_tools(settings, spec) if spec.tool_roles else {}
    model = load_model(
        settings.model,
        name=settings.model_name,
        tokenizer=settings.tokenizer,
        max_batch=settings.max_parallel,
    )
    tokens = settings.max_tokens or spec.limits.max_response_tokens or model.context_tokens
    sampling = SamplingParams(tokens, temperature=settings.temperature)
    judge = by_reward(reward) if settings.with_tools else by_exact_match
    return EpisodeAsker(spec, model, tools, judge, sampling, _digests(settings, with_tools=bool(tools)))


def _chat_asker(settings: QueryConfig, spec: AgentSpec) -> QuestionAsker:
    from afm.distill.queries.askers import ChatAsker, by_exact_match
    from afm.endpoints.chat import EndpointSettings
    from afm.models.openai import served_models

    if settings.with_tools:
        raise UsageError(
            "tokenizer: missing; with_tools on a server needs it: episodes are made of token ids"
        )
    name = settings.model_name
    if name is None:
        served = served_models(settings.model)
        if len(served) != 1:
            raise UsageError(f"model_name: {settings.model} serves {', '.join(served) or 'no model'}")
        [name] = served
    return ChatAsker(
        spec,
        settings.model,
        name,
        by_exact_match,
        temperature=settings.temperature,
        max_tokens=settings.max_tokens or 2048,
        endpoint=EndpointSettings(max_parallel=settings.max_parallel, timeout_s=settings.timeout_s),
    )


def _digests(settings: QueryConfig, *, with_tools: bool) -> dict[str, str]:
    """What samples depend on, in addition to agent and model. The formula over the part ``correct`` is left out."""
    from afm.configuration import read_mapping, validated
    from afm.distill.queries.askers import settings_digest
    from afm.rewards import RewardSettings

    digests = {}
    if settings.with_tools:
        label, data = read_mapping(settings.rewards or {}, "reward")
        rewards = validated(RewardSettings, data, label)
        digests["reward_digest"] = settings_digest(
            rewards.model_dump(mode="json", exclude={"formula", "overlong"})
        )
    if with_tools and settings.tools is not None:
        digests["tools_digest"] = settings_digest(read_mapping(settings.tools, "tools")[1])
    return digests


def _load_tools(settings: QueryConfig, spec: AgentSpec) -> dict[str, Tool]:
    from afm.tools import load_tools

    tools = load_tools(settings.tools) if settings.tools is not None else {}
    needed = set(spec.tool_roles.values())
    if missing := sorted(needed - set(tools)):
        raise ConfigError(f"tools: agent {spec.name!r} needs {', '.join(missing)}; name a file that has them")
    return {name: tools[name] for name in needed}
