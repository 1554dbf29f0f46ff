"""From resolved settings to metrics: load everything, evaluate, close everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from afm.agents import Limits
from afm.configuration import read_mapping, validated
from afm.datasets import Task
from afm.datasets.atomic import replace_text
from afm.errors import DataError
from afm.evaluation.agreement.agree import agree
from afm.evaluation.benchmarks import BENCHMARKS
from afm.evaluation.choosing.choose import choose
from afm.evaluation.config import CONFIG_FILE, EvalConfig, dump_config
from afm.evaluation.manifest import Sources, holds_episodes
from afm.evaluation.metrics import Metrics
from afm.evaluation.play import FailurePolicy
from afm.evaluation.prices import Prices
from afm.evaluation.run import OnProgress, evaluate
from afm.evaluation.task_files import read_benchmark, task_files
from afm.models import SamplingParams, TokenModel, load_model
from afm.rewards import RewardSettings, load_reward
from afm.tools import load_tools

OnVerdict = Callable[[str, int, int], None]
"""Receives what judges are asked for, how much of it is done, and how much there is."""


async def run_job(
    config: EvalConfig, *, on_progress: OnProgress | None = None, on_verdict: OnVerdict | None = None
) -> Metrics:
    """Evaluate as ``config`` says, and have judges choose and judge again where it says so; see :func:`afm.evaluation.evaluate`.

    Raises:
        ConfigError: Settings of agent, model, tools or rewards are wrong.
        DataError: A row of the data is wrong.
    """
    spec = config.spec()
    limits = config.episode_limits(spec)
    tasks = load_tasks(config)
    reward = load_reward(config.rewards)
    tools = load_tools(config.tools_in_use) if config.tools_in_use is not None else {}
    try:
        model = open_model(config)
    except BaseException:
        await asyncio.gather(reward.close(), *(tool.close() for tool in tools.values()))
        raise
    saved = config.out_dir / CONFIG_FILE
    if not saved.exists() or not holds_episodes(config.out_dir):
        replace_text(saved, dump_config(config))
    try:
        metrics = await evaluate(
            tasks,
            spec,
            model,
            tools,
            reward,
            config.out_dir,
            sampling=_sampling(config, limits, model),
            limits=limits,
            rounds=config.rounds,
            parallel=config.parallel,
            seed=config.seed,
            failures=FailurePolicy(config.retries, config.max_failed_share),
            keep_tokens=config.keep_tokens,
            sources=sources_of(config),
            original=config.declared_spec() if config.without_tools else None,
            unseen=config.unseen_roles(spec),
            on_progress=on_progress,
        )
    finally:
        await asyncio.gather(model.close(), reward.close(), *(tool.close() for tool in tools.values()))
    replace_text(saved, dump_config(config))
    return await _judged_further(config, metrics, on_verdict)


async def _judged_further(config: EvalConfig, metrics: Metrics, on_verdict: OnVerdict | None) -> Metrics:
    """What judges add to a finished evaluation."""

    def told(what: str) -> OnProgress | None:
        return None if on_verdict is None else partial(on_verdict, what)

    best_of, _ = config.choosing()
    if best_of is not None:
        metrics = await choose(config.out_dir, best_of, on_progress=told("choices"))
    again, _ = config.agreeing()
    if again is not None:
        metrics = await agree(config.out_dir, again, on_progress=told("second opinions"))
    return metrics


def load_tasks(config: EvalConfig) -> list[Task]:
    """The tasks of all files; with several files an id that stands in two gets its file's name in front.

    Raises:
        DataError: A file or row is wrong, or there is no task at all.
    """
    tasks: list[Task] = []
    seen: set[str] = set()
    for path in _files(config):
        rows = islice(
            read_benchmark(path, reader=config.reader, data_source=config.data_source), config.limit
        )
        for task in rows:
            if task.id in seen:
                task = task.model_copy(update={"id": f"{path.stem}/{task.id}"})
            seen.add(task.id)
            tasks.append(task)
    if not tasks:
        raise DataError(f"no task in {', '.join(map(str, config.data))}; expected at least one")
    return tasks


def _files(config: EvalConfig) -> list[Path]:
    for place in config.data:
        if config.benchmark is not None and not place.exists():
            raise BENCHMARKS[config.benchmark].missing(place)
    return [file for place in config.data for file in task_files(place)]


def open_model(config: EvalConfig) -> TokenModel:
    """The model of ``config``, loaded or connected."""
    settings = config.model
    return load_model(
        settings.path,
        name=settings.name,
        tokenizer=settings.tokenizer,
        context_tokens=settings.context_tokens,
        threads=settings.threads,
        max_batch=config.parallel if settings.folder is None else settings.max_batch,
        seed=config.seed,
    )


def sources_of(config: EvalConfig) -> Sources:
    """What the manifest says about model, tools, rewards and data."""
    return Sources(
        model=config.model.path,
        tools=_content(config.tools_in_use, "tools"),
        reward=_content(config.rewards, "rewards"),
        data=tuple(str(path) for path in config.data),
        benchmark=config.benchmark,
        parallel=config.parallel,
        prices=prices_of(config),
    )


def prices_of(config: EvalConfig) -> Prices | None:
    """``prices``, with the judge's from the rewards.

    Raises:
        ConfigError: They name a tool that the agent does not call.
    """
    if config.prices is None:
        return None
    prices = config.prices.checked(config.declared_spec().tool_roles.values())
    if prices.judge is not None or config.rewards is None:
        return prices
    label, data = read_mapping(config.rewards, "reward")
    known = validated(RewardSettings, data, label).judge.price_per_million_tokens
    return prices.model_copy(update={"judge": known})


def _content(source: Path | dict[str, Any] | None, what: str) -> dict[str, Any] | None:
    return None if source is None else read_mapping(source, what)[1]


def _sampling(config: EvalConfig, limits: Limits, model: TokenModel) -> SamplingParams:
    wanted = config.sampling
    return SamplingParams(
        max_new_tokens=wanted.max_new_tokens or limits.max_response_tokens or model.context_tokens,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
    )
