"""``afm eval``: run evaluations, compare them, and play a team of models."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from afm.cli.eval_judged import agree, choose, print_judged
from afm.cli.options import afm_command
from afm.cli.progress import ProgressView
from afm.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from afm.agents import AgentSpec
    from afm.distill import ScriptedTeam
    from afm.distill.model_team import ModelTeam
    from afm.distill.player import TeamPlayer
    from afm.evaluation import Metrics
    from afm.evaluation.compare import Comparison
    from afm.evaluation.config import EvalConfig, TeamChoice
    from afm.evaluation.paired import Savings


class _RunUnlessNamed(TyperGroup):
    """``afm eval CONFIG`` is ``afm eval run CONFIG``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *self.get_help_option_names(ctx)}:
            args = ["run", *args]
        return list(super().parse_args(ctx, args))


app = typer.Typer(
    cls=_RunUnlessNamed, no_args_is_help=True, help="Evaluate a model: afm eval CONFIG [KEY=VALUE]..."
)


@app.command()
def compare(
    folders: Annotated[
        list[Path], typer.Argument(help="out_dir of two or more evaluations.", exists=True, file_okay=False)
    ],
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compare although settings differ that are not the model's.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare evaluations with the first of them, on the questions they share.

    Runs with other data, agent, tools, reward, sampling, limits, rounds, seed or versions are refused: they did not measure the
    same thing.
    """
    import json
    from dataclasses import asdict

    from afm.evaluation.compare import compare

    if len(folders) < 2:
        raise UsageError(f"got {len(folders)} folder, expected at least two: afm eval compare BEFORE AFTER")
    found = compare(folders, anyway=anyway)
    if as_json:
        keys = ("metrics", "paired", "savings")
        rows = [
            asdict(one)
            | {"folder": str(one.folder)}
            | {key: part.model_dump() if (part := getattr(one, key)) else None for key in keys}
            for one in found
        ]
        print(json.dumps(rows, indent=2))
        return
    for one in found:
        _compared(one)


def _compared(one: Comparison) -> None:
    from afm.evaluation.wording import money_words, number, p_words, percent, points, source_words

    score, paired = one.metrics.pass_at_1, one.paired
    print(f"{one.folder}: pass@1 {percent(score.value if score else None)}")
    if paired is not None:
        change = paired.difference
        print(
            f"  {points(change.value)} points ({points(change.low)} to {points(change.high)}, 95 %) on {paired.questions} "
            f"questions: {paired.gained} better, {paired.lost} worse; {p_words(paired)}"
        )
        for name, part in paired.by_source.items():
            print(f"    {name}: {source_words(part)}, corrected by Holm")
    for text in one.changes:
        print(f"  not comparable: {text}")
    if one.prices:
        print(f"  {one.prices}")
    print(
        f"  tool calls {number(one.metrics.tool_calls)}, agent tokens {number(one.metrics.agent_tokens)}{_cost(one.metrics)}"
    )
    if money := money_words(one.metrics):
        print(f"  cost: {money}")
    if one.savings is not None:
        _saved(one.savings)


def _saved(savings: Savings) -> None:
    from afm.evaluation.wording import cost_cells, savings_words

    print(f"  {savings_words(savings)}")
    print(f"    {'a task':28}{'team':>16}{'model':>16}   model minus team (95 %); saving (95 %)")
    for cell in map(cost_cells, savings.rows):
        change = f"{cell.difference} ({cell.difference_range})" if cell.difference_range else "–"
        saved = f"{cell.saving} ({cell.saving_range})" if cell.saving_range else "–"
        print(f"    {cell.label:28}{cell.team:>16}{cell.model:>16}   {change}; {saved}")
    for note in savings.notes:
        print(f"    {note}")


def _cost(metrics: Metrics) -> str:
    from afm.evaluation.wording import number

    cost = metrics.per_solved
    return (
        f"; per solved episode {number(cost['tool_calls'])} and {number(cost.get('agent_tokens'))}"
        if cost
        else ""
    )


app.command()(choose)
app.command()(agree)


@app.command(name="run")
def evaluation(
    config: Annotated[
        Path,
        typer.Argument(
            help="YAML of the benchmark, e.g. configs/eval/aime24.yaml.", exists=True, dir_okay=False
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="For example model=DIR sampling.temperature=0.6 limit=10."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved settings, check them, run nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print metrics.json at the end.")] = False,
) -> None:
    """Evaluate a model with the agent's own loop, or a team (team=FILE); a run that was killed continues with the same command.

    Writes manifest.json, episodes.jsonl and metrics.json into out_dir.
    """
    from afm.evaluation.config import load_config

    settings = load_config(config, overrides or [])
    if dry_run:
        _dry_run(settings)
        return
    metrics = _run(settings)
    if as_json:
        print(metrics.model_dump_json(indent=2, ensure_ascii=True))
    else:
        _summary(settings, metrics)


def _dry_run(settings: EvalConfig) -> None:
    """Everything that can be checked without loading the model."""
    from afm.evaluation.config import dump_config
    from afm.evaluation.job import load_tasks, prices_of, tasks_by_agent
    from afm.rewards import load_reward
    from afm.tools import load_tools

    print(dump_config(settings), end="")
    routes = settings.routes()
    settings.published_protocol()
    folder = settings.model.folder if settings.model is not None else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            f"model.path: {folder} is no folder; expected a model's folder or an http(s) address"
        )
    if settings.team is not None:
        check_team(settings, routes.first.declared)
    prices_of(settings)
    tasks = load_tasks(settings)
    own = tasks_by_agent(settings, routes, tasks)
    for route in routes:
        if settings.team is None and (tools := settings.tools_in_use(route)) is not None:
            load_tools(tools)
        load_reward(route.rewards)
        spec, share = route.declared, f", {len(own[route.name])} tasks" if routes.by_row else ""
        bound = (
            f"team {settings.team.file}" if settings.team else f"{route.limits.max_turns} tool calls at most"
        )
        print(f"# agent {spec.name} ({spec.digest}), {bound}{share}")
    print(f"# {len(tasks)} tasks x {settings.rounds} rounds into {settings.out_dir}; nothing was run")


def _run(settings: EvalConfig) -> Metrics:
    from afm.evaluation.job import run_job

    view = ProgressView(sys.stderr)

    def show(done: int, total: int) -> None:
        view.update(f"{settings.name}, episodes", done, total)

    def judged(what: str, done: int, total: int) -> None:
        view.update(f"{settings.name}, {what}", done, total)

    try:
        return asyncio.run(run_job(settings, open_team=open_team, on_progress=show, on_verdict=judged))
    except KeyboardInterrupt:
        print(f"\nstopped; the same command continues in {settings.out_dir}", file=sys.stderr)
        raise typer.Exit(130) from None


def _summary(settings: EvalConfig, metrics: Metrics) -> None:
    from afm.evaluation.wording import (
        agent_h_words,
        agent_words,
        hallucination_words,
        money_words,
        number,
        percent,
        t_eval_words,
        unseen_words,
    )

    score = metrics.pass_at_1
    if score is not None:
        name = f"avg@{metrics.rounds}" if metrics.rounds > 1 else "pass@1"
        interval = f"95 % interval {percent(score.low)} to {percent(score.high)}"
        print(f"{settings.name}: {name} {percent(score.value)} ({interval})")
    if metrics.rounds > 1:
        k = metrics.rounds
        print(
            f"  pass@{k} {percent(metrics.pass_at_k[k])}, pass^{k} {percent(metrics.pass_hat_k[k])}, "
            f"majority of {k} {percent(metrics.majority)}"
        )
    for agent, part in metrics.by_agent.items():
        print(f"  {agent}: {agent_words(part)}")
    if metrics.t_eval:
        print(f"  {t_eval_words(metrics.t_eval)}")
    if metrics.agent_h:
        print(f"  {agent_h_words(metrics.agent_h)}")
    print_judged(metrics)
    for _, note in (settings.choosing(), settings.agreeing()):
        if note:
            print(f"  {note}")
    print(f"  {metrics.scored} of {metrics.episodes} episodes scored, {metrics.questions} questions")
    print(
        f"  format valid {percent(metrics.format_valid)}, tool calls {number(metrics.tool_calls)}, "
        f"agent tokens {number(metrics.agent_tokens)}, {number(metrics.seconds)} s an episode{_cost(metrics)}"
    )
    if money := money_words(metrics):
        print(f"  cost: {money}")
    for words in (hallucination_words(metrics), unseen_words(metrics)):
        if words:
            print(f"  {words}")
    print(
        f"\nepisodes: {settings.out_dir}/episodes.jsonl\nnext: {afm_command()} report {shlex.quote(str(settings.out_dir))}"
    )


SCRIPTED = "scripted"
"""Names the embedded team of the agent in place of a file."""
EVENTS_FILE = "team_events.jsonl"
"""In the evaluation's folder: everything that the members did, attempts that failed included."""


@asynccontextmanager
async def open_team(config: EvalConfig, spec: AgentSpec) -> AsyncIterator[tuple[TeamPlayer, dict[str, Any]]]:
    """The team that ``config`` names, and what the manifest says about it; all is closed at the end.

    Raises:
        ConfigError: The team's file, its tools or its roles are wrong.
        UsageError: A change of its file is wrong.
    """
    from afm.distill.model_team import ModelTeam
    from afm.distill.player import TeamPlayer
    from afm.tools import load_tools

    team = _team(config, spec)
    source = config.tools or (team.settings.tools if isinstance(team, ModelTeam) else None)
    async with AsyncExitStack() as opened:
        if isinstance(team, ModelTeam):
            opened.push_async_callback(team.close)
        tools = load_tools(source) if source is not None else {}
        for tool in tools.values():
            opened.push_async_callback(tool.close)
        if missing := sorted(_needed(team, spec) - set(tools)):
            raise ConfigError(
                f"the team calls {missing}; `tools` has {sorted(tools)}; name a file that has all of them"
            )
        priced = isinstance(team, ModelTeam) and team.priced
        log = config.out_dir / EVENTS_FILE
        player = opened.enter_context(TeamPlayer(team, spec, team.roles, tools, log, priced=priced))
        yield player, _described(team)


def check_team(config: EvalConfig, spec: AgentSpec) -> None:
    """Read the team's file and its tools, and start nothing.

    Raises:
        ConfigError: Something in them is wrong.
    """
    from afm.tools import load_tools

    _team(config, spec).roles.checked(spec)
    if config.tools is not None:
        load_tools(config.tools)


def _team(config: EvalConfig, spec: AgentSpec) -> ModelTeam | ScriptedTeam:
    from afm.distill import scripted_team
    from afm.distill.model_team import load_team

    choice = _chosen(config)
    if choice.file != SCRIPTED:
        return load_team(choice.file, spec, choice.changes)
    if choice.changes:
        raise UsageError(
            f"team.{choice.changes[0]}: the scripted team has no file to change; give one: team=FILE"
        )
    return scripted_team(spec, config.seed)


def _chosen(config: EvalConfig) -> TeamChoice:
    if config.team is None:
        raise ConfigError("this evaluation has a model and no team")
    return config.team


def _needed(team: ModelTeam | ScriptedTeam, spec: AgentSpec) -> set[str]:
    from afm.distill.model_team import ModelTeam

    if isinstance(team, ModelTeam):
        return {tool for member in team.settings.tool_agents.values() for tool in member.tools}
    return set(spec.tool_roles.values())


def _described(team: ModelTeam | ScriptedTeam) -> dict[str, Any]:
    from afm.distill.model_team import ModelTeam

    if not isinstance(team, ModelTeam):
        return {"members": {}}
    return {
        "members": {name: team.model_of(name) for name in team.settings.all_members},
        "limits": team.settings.limits.model_dump(mode="json"),
    }
