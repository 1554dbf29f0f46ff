"""``afm data distill``, ``afm data expand``, ``afm data queries``: trajectories, and questions to train on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.cli.options import (
    TasksArgument,
    TrustOption,
    agent_option,
    file_argument,
    file_option,
    overrides_argument,
    print_losses,
    reward_beside,
)
from afm.errors import BudgetSpentError, ConfigError, DataError, UsageError, with_path
from afm.terminal import plural

if TYPE_CHECKING:
    from afm.agents import AgentSpec
    from afm.datasets import Task
    from afm.distill.expand import ExpandSummary
    from afm.distill.queries.askers import QuestionAsker
    from afm.distill.queries.sampling import OnSample, QueryConfig
    from afm.distill.queries.select import QuerySummary
    from afm.distill.run import DistillSummary, Progress, TeamWithRoles
    from afm.endpoints.budget import Spent
    from afm.rewards import Reward
    from afm.terminal import ProgressView
    from afm.tools import Tool


_RewardsOption = Annotated[
    Path | None,
    file_option(
        "Reward YAML that decides which answers are kept [default: the scorer of each row's data_source]."
    ),
]


def distill(
    tasks: TasksArgument,
    output_dir: Annotated[Path, typer.Option(help="Folder for the event log and trajectories.jsonl.")],
    overrides: Annotated[
        list[str] | None, overrides_argument("Overrides for the file of --team, for example budget.usd=5.")
    ] = None,
    team: Annotated[
        Path | None,
        file_option(
            "YAML of a team: models (configs/distill), your own class (`class_name`) or program (`harness`) "
            "[default: the scripted team of --agent]."
        ),
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="Shipped agent or YAML [default: the team's, else math].")
    ] = None,
    tools: Annotated[
        Path | None, file_option("Tools YAML [default: the team's, else the sandboxed code tool].")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the team's random choices.")] = 0,
    rewards: _RewardsOption = None,
    max_parallel: Annotated[int, typer.Option(min=1, help="Number of problems solved at the same time.")] = 4,
    trust: TrustOption = False,
) -> None:
    """Turn a team's work on problems into trajectories.

    The team solves every problem with real tools. Work with a wrong answer is dropped, with its reason.

    If interrupted, run the same command again to resume. If the team's budget is spent, raise it and run the command
    again.

    Example: afm data distill tasks.jsonl --team configs/distill/mhqa.yaml --output-dir data/mhqa budget.usd=5
    """
    from afm.configuration import read_file
    from afm.terminal import ProgressView

    if overrides and team is None:
        raise UsageError(f"{overrides[0]!r}: overrides change the file of --team; give one: --team FILE")
    if team is not None:
        # The rewards are checked before the team is opened. They would take a reward YAML for a team's.
        read_file(team, "a team")
    view = ProgressView()
    opened = opened_team(team, agent, tools, seed, overrides or ())
    try:
        summary = asyncio.run(
            _distill(tasks, output_dir, opened, seed, max_parallel, rewards, view.update, team)
        )
    except ConfigError as error:
        raise ConfigError(with_path(str(error), tasks)) from None
    before, after = "", f", {summary.seconds:.0f} s"
    if summary.team.resumed == summary.tasks:
        before, after = "nothing left to do, in total ", ""
    view.line(
        f"{summary.path}: {before}{summary.kept:,} of {plural(summary.tasks, 'trajectory', 'trajectories')} kept, "
        f"{plural(summary.tool_calls, 'tool call')}{after}{_cost(summary.spent)}"
    )
    _explain_losses(summary, output_dir)


def _explain_losses(summary: DistillSummary, output_dir: Path) -> None:
    """Print why rows were dropped. A spent budget, or no rows at all, is an error."""
    print_losses(summary.dropped, summary.examples, output_dir / "dropped.jsonl")
    if summary.team.stopped:
        raise BudgetSpentError(
            f"{summary.team.stopped} ({summary.not_tried:,} of {plural(summary.tasks, 'task')} not begun)"
        )
    if not summary.kept:
        example = next(iter(summary.examples.values()))
        message = f"no trajectory was kept; dropped.jsonl lists the reasons. The first one: {example}"
        raise DataError(message, path=str(output_dir))


def _cost(spent: Spent) -> str:
    from afm.evaluation.wording import dollars

    usd = f", {dollars(spent.usd)} in total" if spent.usd else ""
    return f", {plural(spent.tokens, 'token')}{usd}" if spent.tokens else ""


_Opened = tuple["TeamWithRoles", "AgentSpec", dict[str, "Tool"], dict[str, str]]


async def _distill(
    file: Path,
    output_dir: Path,
    opened: AbstractAsyncContextManager[_Opened],
    seed: int,
    max_parallel: int,
    rewards: Path | None,
    progress: Progress,
    team_file: Path | None,
) -> DistillSummary:
    from afm.datasets import read_tasks
    from afm.distill.run import distill as run

    tasks = list(read_tasks(file))
    if not tasks:
        raise DataError(
            "holds no questions, only the names of its columns; add a row for each question", path=str(file)
        )
    for task in tasks if rewards is None else ():
        if not task.extra_info.get("reward") and (text := reward_beside(task.data_source, file, team_file)):
            raise UsageError(f"task {task.id!r}: {text}")
    async with opened as (team, spec, tools, files):
        return await run(
            tasks,
            spec,
            tools,
            output_dir,
            team=team,
            seed=seed,
            max_parallel=max_parallel,
            rewards=rewards,
            progress=progress,
            files=files | {"tasks": f"the tasks of {file}"},
        )


@asynccontextmanager
async def opened_team(
    file: Path | None, agent: str | None, tools_file: Path | None, seed: int, overrides: Sequence[str]
) -> AsyncIterator[_Opened]:
    """Yield the team, its agent, its tools and the files behind their digests, and close them at the end."""
    from afm.cli.options import configs_folder
    from afm.distill.model_team.settings import TeamSettings
    from afm.distill.scripted_teams import scripted_team
    from afm.distill.team_player import open_team
    from afm.tools import check_tools, load_tools

    who, needed, files = "", set[str](), {"agent_digest": f"agent {agent or 'math'}"}
    async with AsyncExitStack() as stack:
        team: TeamWithRoles
        if file is None:
            spec = agent_option(agent or "math")
            team = scripted_team(spec, seed)
            tools_file = tools_file or configs_folder() / "tools/code_executor.yaml"
        else:
            team = members = open_team(file, agent_option(agent) if agent else None, overrides, seed)
            stack.push_async_callback(members.close)
            spec = members.spec
            files = {"agent_digest": f"agent {agent or members.settings.agent}"}
            files["team"] = getattr(members, "source", str(file))
            tools_file = tools_file or members.settings.tools
            if isinstance(members.settings, TeamSettings):
                who, needed = f"{file}: the team", members.settings.called_tools
        tools = load_tools(tools_file) if tools_file is not None else {}
        for tool in tools.values():
            stack.push_async_callback(tool.close)
        if tools_file is not None:
            check_tools(who or f"agent {spec.name!r}", needed or spec.tool_roles.values(), tools)
        yield team, spec, tools, files


def expand(
    config: Annotated[Path, file_argument("YAML of the expansion, for example configs/expand/world.yaml.")],
    overrides: Annotated[
        list[str] | None, overrides_argument("Overrides, for example output_dir=DIR growth=width count=100.")
    ] = None,
    trust: TrustOption = False,
) -> None:
    """Build questions that need several pages.

    Each question comes with its answer and a proof that no page can be left out.
    Questions come from a generated world by rules, or from models that read a corpus or the web. The command writes
    tasks.jsonl and manifest.json into output_dir. If interrupted, run the same command again to resume.
    """
    from afm.distill.expand import WorldExpansion, expand_world, read_expansion
    from afm.distill.expand import expand as expand_by_models
    from afm.terminal import ProgressView

    settings = read_expansion(config, overrides or [])
    if isinstance(settings, WorldExpansion):
        path = expand_world(settings)
        print(f"{path}: {plural(settings.count, 'question')}, each proved to need its pages")
        return
    view = ProgressView()
    _show_expansion(asyncio.run(expand_by_models(settings, view.update)), view)


def _show_expansion(summary: ExpandSummary, view: ProgressView) -> None:
    made = f"{plural(summary.kept, 'question')} of {plural(summary.groups, 'group')}"
    view.line(f"{summary.path}: {made}{_cost(summary.spent)}")
    for reason, number in sorted(summary.rejected.items()):
        print(f"  rejected: {number} {reason}")
    if summary.failed:
        print(f"  failed: {summary.failed}; the same command tries them again")
    if summary.stopped:
        raise BudgetSpentError(summary.stopped)


_NAMED = 5


def queries(
    config: Annotated[Path, file_argument("YAML of the selection, for example configs/queries/qa.yaml.")],
    overrides: Annotated[
        list[str] | None,
        overrides_argument("Overrides, for example tasks=nq.jsonl model=DIR_OR_URL target=1000."),
    ] = None,
    trust: TrustOption = False,
) -> None:
    """Select questions for reinforcement learning.

    The command samples answers of a model and drops questions that the model already answers too often. It writes
    samples.jsonl, kept.jsonl and dropped.jsonl into output_dir. A server (http://HOST:PORT/v1, key in
    AFM_MODEL_API_KEY) is asked for chat completions, or for token ids if `tokenizer` is set. If interrupted, run the
    same command again to resume.
    """
    from afm.distill.queries.sampling import read_selection
    from afm.terminal import ProgressView

    settings = read_selection(config, overrides or [])
    view = ProgressView()
    summary = asyncio.run(_run(settings, partial(view.update, "samples")))
    _print_summary(summary, view, compared=bool(settings.sft) or settings.with_tools)


def _print_summary(summary: QuerySummary, view: ProgressView, *, compared: bool) -> None:
    view.line(
        f"{summary.path}: {summary.kept:,} of {plural(summary.tasks, 'question')} kept, "
        f"{plural(summary.sampled, 'sample')} taken"
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
    """Load the model, or connect to it."""
    from afm.agents import lacks_model, load_agent
    from afm.agents.load import without_tools
    from afm.distill.queries.askers import EpisodeAsker, by_exact_match, by_reward
    from afm.models import SamplingParams, load_model

    declared = load_agent(settings.agent)
    served = "://" in settings.model
    if served and settings.tokenizer is None:
        return _chat_asker(settings, without_tools(declared))
    if not served and (why := lacks_model(settings.model)):
        raise UsageError(
            f"model: {settings.model}: {why}; expected a model's folder, a run, or http://HOST:PORT/v1"
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
            "tokenizer: missing; with_tools on a server needs it, because episodes consist of token ids"
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
    """Return digests of settings that samples depend on, except agent, model and the formula of the reward."""
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
