"""``afm eval``: evaluate a model or a team, compare evaluations, let judges choose and measure their agreement."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from afm.cli.options import (
    FOREIGN_OPTIONS,
    JsonOption,
    TrustOption,
    file_argument,
    overrides_argument,
)
from afm.errors import ConfigError, UsageError
from afm.terminal import ProgressView, afm_command, plural

if TYPE_CHECKING:
    from afm.agents import AgentSpec
    from afm.distill.model_team.team import ModelTeam
    from afm.distill.scripted_teams import ScriptedTeam
    from afm.distill.team_player import OwnTeam, TeamPlayer
    from afm.evaluation import Metrics
    from afm.evaluation.compare import Comparison
    from afm.evaluation.config import EvalConfig
    from afm.evaluation.paired import Savings


class _RunUnlessNamed(TyperGroup):
    """``afm eval CONFIG`` is ``afm eval run CONFIG``."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words after ``afm eval`` in the usage line."""
        return ["CONFIG [KEY=VALUE]... [--dry-run] [--json]"]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {*self.commands, *self.get_help_option_names(ctx)}
        if args and args[0] not in own:
            word, near = args[0], get_close_matches(args[0], self.commands, cutoff=0.75)
            if not near or word.startswith("-") or "=" in word or Path(word).suffix or Path(word).exists():
                args = ["run", *args]  # else a command that was typed wrong
        return list(super().parse_args(ctx, args))

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the completions of a word: of its own, and the options of ``run``."""
        run = self.commands["run"].shell_complete(ctx, incomplete) if incomplete.startswith("-") else []
        return list({item.value: item for item in [*super().shell_complete(ctx, incomplete), *run]}.values())


app = typer.Typer(
    cls=_RunUnlessNamed,
    no_args_is_help=True,
    help="Evaluate a model or a team with the agent's own loop.\n\n"
    "`afm list benchmarks` lists the shipped CONFIG files. `afm eval run --help` explains the options. "
    "All commands below but `run` work on finished evaluations.\n\n"
    "Example: afm eval configs/eval/aime24.yaml model=models/code_agent_7b limit=10",
)


FolderArgument = Annotated[
    Path, typer.Argument(help="output_dir of a finished evaluation.", exists=True, file_okay=False)
]
MetricsOption = Annotated[bool, typer.Option("--json", help="Print metrics.json at the end.")]


@app.command()
def compare(
    folders: Annotated[
        list[Path],
        typer.Argument(help="output_dir of two or more evaluations.", exists=True, file_okay=False),
    ],
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Compare although settings other than the model differ.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare evaluations with the first one, on shared questions.

    Runs whose data, agent, tools, reward, sampling, limits, rounds, seed or versions differ are not comparable.
    They are rejected without --anyway.
    """
    import json
    from dataclasses import asdict

    from afm.evaluation.compare import compare

    if len(folders) < 2:
        raise UsageError(f"got {len(folders)} folder, expected at least two: afm eval compare BEFORE AFTER")
    comparisons = compare(folders, anyway=anyway)
    if as_json:
        keys = ("metrics", "paired", "savings")
        rows = [
            asdict(comparison)
            | {"folder": str(comparison.folder)}
            | {key: part.model_dump() if (part := getattr(comparison, key)) else None for key in keys}
            for comparison in comparisons
        ]
        print(json.dumps(rows, indent=2))
        return
    for comparison in comparisons:
        _print_comparison(comparison)


def _print_comparison(run: Comparison) -> None:
    from afm.evaluation.wording import cost_lines, number, p_words, percent, points, source_words

    score, paired = run.metrics.pass_at_1, run.paired
    print(f"{run.folder}: pass@1 {percent(score.value if score else None)}")
    if paired is not None:
        change = paired.difference
        print(
            f"  {points(change.value)} points ({points(change.low)} to {points(change.high)}, 95 %) on "
            f"{plural(paired.questions, 'question')}: {paired.gained} better, {paired.lost} worse; {p_words(paired)}"
        )
        for name, part in paired.by_source.items():
            print(f"    {name}: {source_words(part)}, corrected by Holm")
    for text in run.changes:
        print(f"  not comparable: {text}")
    if run.prices:
        print(f"  {run.prices}")
    print(f"  tool calls {number(run.metrics.tool_calls)}, agent tokens {number(run.metrics.agent_tokens)}")
    for line in cost_lines(run.metrics):
        print(f"  {line}")
    if run.savings is not None:
        _print_savings(run.savings)


def _print_savings(savings: Savings) -> None:
    from afm.evaluation.wording import cost_cells, savings_words

    print(f"  {savings_words(savings)}")
    print(f"    {'a task':28}{'team':>16}{'model':>16}   model minus team (95 %); saving (95 %)")
    for cell in map(cost_cells, savings.rows):
        change = f"{cell.difference} ({cell.difference_range})" if cell.difference_range else "–"
        saved = f"{cell.saving} ({cell.saving_range})" if cell.saving_range else "–"
        print(f"    {cell.label:28}{cell.team:>16}{cell.model:>16}   {change}; {saved}")
    for note in savings.notes:
        print(f"    {note}")


@app.command(name="run", context_settings=FOREIGN_OPTIONS)
def evaluation(
    config: Annotated[Path, file_argument("YAML of the evaluation, for example configs/eval/aime24.yaml.")],
    overrides: Annotated[
        list[str] | None,
        overrides_argument("Overrides, for example model=DIR sampling.temperature=0.6 limit=10."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print and check the resolved settings; run nothing.")
    ] = False,
    as_json: MetricsOption = False,
    trust: TrustOption = False,
) -> None:
    """Evaluate a model with the agent's own loop, or a team (team=FILE).

    The command writes manifest.json, episodes.jsonl and metrics.json into output_dir. If interrupted, run the same
    command again to resume.
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
    """Check everything that does not need the loaded model."""
    from afm.evaluation.config import dump_config
    from afm.evaluation.job import check_model, load_tasks, prices_of, tasks_by_agent
    from afm.rewards import load_reward
    from afm.tools import load_tools

    print(dump_config(settings, Path()), end="")
    routes = settings.routes()
    settings.published_protocol()
    check_model(settings)
    if settings.team is not None:
        check_team(settings, routes.first.declared)
    prices_of(settings)
    tasks = load_tasks(settings)
    own = tasks_by_agent(settings, routes, tasks)
    for route in routes:
        if settings.team is None and (tools := settings.tools_in_use(route)) is not None:
            load_tools(tools)
        load_reward(route.rewards)
        spec, share = route.declared, f", {plural(len(own[route.name]), 'task')}" if routes.by_row else ""
        bound = (
            f"team {settings.team.file}" if settings.team else f"{route.limits.max_turns} tool calls at most"
        )
        print(f"# agent {spec.name} ({spec.digest}), {bound}{share}")
    work = f"{plural(len(tasks), 'task')} x {plural(settings.rounds, 'round')}"
    print(f"# {work} into {settings.output_dir}; nothing was run")


def _run(settings: EvalConfig) -> Metrics:
    from afm.distill.team_policy import player_of
    from afm.evaluation.job import run_job

    view = ProgressView(sys.stderr)

    def judged(what: str, done: int, total: int) -> None:
        view.update(f"{settings.name}, {what}", done, total)

    show = partial(view.update, f"{settings.name}, episodes")
    job = run_job(settings, open_team=open_team, open_harness=player_of, on_progress=show, on_verdict=judged)
    return _resumable(job, settings.output_dir)


def _summary(settings: EvalConfig, metrics: Metrics) -> None:
    from afm.evaluation.wording import metric_lines, number, percent

    score = metrics.pass_at_1
    if score is not None:
        name = f"avg@{metrics.rounds}" if metrics.rounds > 1 else "pass@1"
        interval = f"95 % interval {percent(score.low)} to {percent(score.high)}"
        print(f"{settings.name}: {name} {percent(score.value)} ({interval})")
    _print_lines(metric_lines(metrics))
    for _, note in (settings.choosing(), settings.agreeing()):
        if note:
            print(f"  {note}")
    scored = f"{metrics.scored:,} of {plural(metrics.episodes, 'episode')} scored"
    print(f"  {scored}, {plural(metrics.questions, 'question')}")
    print(
        f"  format valid {percent(metrics.format_valid)}, tool calls {number(metrics.tool_calls)}, "
        f"agent tokens {number(metrics.agent_tokens)}, {number(metrics.seconds)} s an episode"
    )
    _print_next(f"episodes: {settings.output_dir}/episodes.jsonl", settings.output_dir)


def _print_lines(lines: Iterable[str]) -> None:
    """Print lines, indented and at most 100 columns wide."""
    wrapper = TextWrapper(100, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
    wrapper.break_on_hyphens = False
    for line in lines:
        print(wrapper.fill(line))


def _print_next(written: str, folder: Path) -> None:
    print(f"\n{written}\nnext: {afm_command()} report {shlex.quote(str(folder))}")


@app.command()
def choose(
    folder: FolderArgument,
    settings: Annotated[
        list[str] | None,
        overrides_argument(
            "Overrides of the key `best_of`: sizes=[3] methods=[list,score] judge.model=NAME."
        ),
    ] = None,
    as_json: MetricsOption = False,
) -> None:
    """Compute best-of-k: a judge picks one round of each question.

    The judge does not see the gold answer. GRM_BASE_URL, GRM_API_KEY and GRM_MODEL_NAME, or judge.url, set the judge.
    The command writes choices.jsonl and adds to metrics.json. If interrupted, run the same command again: it skips
    choices that are already written.
    """
    from afm.evaluation.best_of import CHOICES_FILE, BestOfSettings, choose
    from afm.evaluation.config import saved_section

    wanted = saved_section(folder, "best_of", BestOfSettings, settings or [])
    work = choose(folder, wanted, on_progress=partial(ProgressView(sys.stderr).update, "verdicts"))
    _judged(work, folder, CHOICES_FILE, as_json=as_json)


@app.command()
def agree(
    folder: FolderArgument,
    settings: Annotated[
        list[str] | None,
        overrides_argument(
            "Overrides of the key `agreement`: judges=[{model: NAME}] repeats=2 episodes=100."
        ),
    ] = None,
    as_json: MetricsOption = False,
) -> None:
    """Measure how well judges agree.

    A second judge, or the same one again, judges the answers. The command prints raw agreement and Cohen's kappa.
    GRM_BASE_URL, GRM_API_KEY and GRM_MODEL_NAME, or judges[..].url, set the judge. The command writes opinions.jsonl
    and adds to metrics.json. It skips opinions that are already written.
    """
    from afm.evaluation.config import saved_section
    from afm.evaluation.judging import OPINIONS_FILE, AgreementSettings, agree

    wanted = saved_section(folder, "agreement", AgreementSettings, settings or [])
    work = agree(folder, wanted, on_progress=partial(ProgressView(sys.stderr).update, "verdicts"))
    _judged(work, folder, OPINIONS_FILE, as_json=as_json)


def _judged(work: Coroutine[Any, Any, Metrics], folder: Path, file: str, *, as_json: bool) -> None:
    from afm.evaluation.wording import judged_lines

    metrics = _resumable(work, folder)
    if as_json:
        print(metrics.model_dump_json(indent=2, ensure_ascii=True))
        return
    _print_lines(judged_lines(metrics))
    _print_next(f"verdicts: {folder / file}", folder)


def _resumable(work: Coroutine[Any, Any, Metrics], folder: Path) -> Metrics:
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        print(f"\nstopped; run the same command again to resume in {folder}", file=sys.stderr)
        raise typer.Exit(130) from None


SCRIPTED = "scripted"
"""Value of ``team`` for the agent's scripted team."""
EVENTS_FILE = "team_events.jsonl"
"""File in the evaluation's folder with all events of the members, also of failed attempts."""


@asynccontextmanager
async def open_team(config: EvalConfig, spec: AgentSpec) -> AsyncIterator[tuple[TeamPlayer, dict[str, Any]]]:
    """Open the team of ``config``, and yield it with its manifest entry. Everything is closed at the end.

    Raises:
        ConfigError: The team's file, its tools or its roles are wrong.
        UsageError: An override of its file is wrong.
    """
    from afm.distill.model_team.team import ModelTeam
    from afm.distill.team_player import TeamPlayer
    from afm.tools import check_tools, load_tools

    team = _team(config, spec)
    models = team if isinstance(team, ModelTeam) else None
    source = config.tools or (models.settings.tools if models else None)
    if models is None:
        needed, described = set(spec.tool_roles.values()), dict[str, Any](members={})
    else:
        needed = models.settings.called_tools
        described = {
            "members": {name: models.model_of(name) for name in models.settings.all_members},
            "limits": models.settings.limits.model_dump(mode="json"),
        }
    async with AsyncExitStack() as opened:
        if models is not None:
            opened.push_async_callback(models.close)
        tools = load_tools(source) if source is not None else {}
        for tool in tools.values():
            opened.push_async_callback(tool.close)
        check_tools("the team", needed, tools)
        priced = models is not None and models.priced
        log = config.output_dir / EVENTS_FILE
        yield opened.enter_context(TeamPlayer(team, spec, tools, log, priced=priced)), described


def check_team(config: EvalConfig, spec: AgentSpec) -> None:
    """Check the team's file and its tools without starting anything."""
    from afm.tools import load_tools

    _team(config, spec).roles.checked(spec)
    if config.tools is not None:
        load_tools(config.tools)


def _team(config: EvalConfig, spec: AgentSpec) -> ModelTeam | OwnTeam | ScriptedTeam:
    from afm.distill.program_team import ProgramTeam
    from afm.distill.scripted_teams import scripted_team
    from afm.distill.team_player import open_team as open_file
    from afm.distill.team_policy import TrainedTeam

    choice = config.team
    if choice is None:
        raise ConfigError("this evaluation has a model and no team")
    if choice.file != SCRIPTED:
        team = open_file(choice.file, spec, choice.changes, config.seed)
        if isinstance(team, (ProgramTeam, TrainedTeam)):
            raise ConfigError(
                f"team: {choice.file} has a harness; give its keys `harness` and `model` instead of `team`"
            )
        return team
    if choice.changes:
        raise UsageError(
            f"team.{choice.changes[0]}: the scripted team has no file for overrides; give one: team=FILE"
        )
    return scripted_team(spec, config.seed)
