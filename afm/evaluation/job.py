"""Run an evaluation from its settings: load model, tools, rewards and data, evaluate, and close them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from afm.agents import AgentSpec, PromptMode, PromptSource, lacks_model
from afm.agents.prompt_record import RunPrompts, run_prompts
from afm.configuration import read_mapping, validated
from afm.datasets import Task, task_of_row
from afm.datasets.published import rows_of
from afm.datasets.readers import READERS
from afm.datasets.row_files import SUFFIXES, data_files, published_rows
from afm.datasets.schema import UNCLEAR_QUESTION, question_is_unclear
from afm.errors import DataError, UsageError, exists_next_to, first_fault, json_word, no_such_file, with_path
from afm.evaluation.agents import RowAgents, content_of, with_judge_text
from afm.evaluation.benchmarks import BENCHMARKS, READ_AS_PUBLISHED
from afm.evaluation.best_of import choose
from afm.evaluation.config import CONFIG_FILE, EvalConfig, dump_config
from afm.evaluation.judging import agree
from afm.evaluation.manifest import Conditions, Sources, holds_episodes
from afm.evaluation.metrics import Metrics
from afm.evaluation.prices import Prices
from afm.evaluation.run import OnProgress, evaluate
from afm.findings import fetch_advice
from afm.harness.player import HarnessPlayer
from afm.models import SamplingParams, TokenModel, load_model
from afm.play import FailurePolicy, Player
from afm.rewards import RewardSettings, load_reward
from afm.rollout.routes import Opened, Route, Routes
from afm.runs.atomic import replace_text
from afm.tools import load_tools

_OUR_KEYS = frozenset({"ground_truth", "data_source", "prompt", "reward_model"})
"""A row with one of these keys is in our layout: a task, a raw question or an RL row."""


def task_files(place: Path) -> list[Path]:
    """Return the file, or all files of a folder that can hold rows, by name.

    Raises:
        DataError: The folder holds no such file.
    """
    if not place.is_dir():
        return [place]
    rows = [path for path in data_files(place) if not path.name.endswith((".manifest.json", ".lock.json"))]
    if not rows:
        raise DataError(f"holds no file of questions; expected {', '.join(SUFFIXES)}", path=str(place))
    return rows


def read_benchmark(
    file: Path, *, reader: str | None = None, data_source: str | None = None, routes: Routes | None = None
) -> Iterator[Task]:
    """Stream the questions of one file.

    Args:
        reader: Name of a reader (see :mod:`afm.datasets.readers`), for rows whose layout differs from ours.
        data_source: Data source of rows without one. It selects the reward.
        routes: The agents. A row is rejected if its agent does not use the prompt of the row and the question cannot be
            separated from that prompt.

    Raises:
        DataError: At the first bad row, with file and line (parquet: row, counted from 1).
    """
    seen: set[str] = set()
    rows = published_rows(file) if reader is None else rows_of(file, READERS[reader])
    for number, row in rows:
        try:
            task = _task(row, f"{file.stem}-{number}", reader, data_source)
            if task.id in seen:
                raise DataError(f"id {task.id!r} was used by an earlier row; ids must be unique")
            route = routes.find(task.data_source, task.ability) if routes else None
            if route and route.prompt.mode is not PromptMode.ROW and question_is_unclear(row):
                raise DataError(UNCLEAR_QUESTION)
        except DataError as error:
            raise DataError(with_path(error.message, file), path=str(file), line=number) from None
        seen.add(task.id)
        yield task


def _task(row: Any, default: str, reader: str | None, data_source: str | None) -> Task:
    if isinstance(row, DataError):
        raise row
    if not isinstance(row, Mapping):
        raise DataError(f"expected an object, got {json_word(row)}")
    if reader is None or _OUR_KEYS & row.keys():
        return task_of_row(row, default_id=default, data_source=data_source)
    try:
        task = READERS[reader].read(row, default)
    except ValidationError as error:
        raise DataError(first_fault(error)) from None
    except DataError as error:
        raise DataError(
            f"reader {reader!r}: {error.message}. `afm data prepare tasks FILE --reader {reader} -o TASKS.jsonl` drops "
            "these rows and lists them"
        ) from None
    if not isinstance(task, Task):
        raise DataError(f"reader {reader!r} makes rows of kind {type(task).__name__}, not questions")
    return task if task.data_source else task.model_copy(update={"data_source": data_source or ""})


_LOG = logging.getLogger(__name__)

OnVerdict = Callable[[str, int, int], None]
"""Receives what judges are asked for, the number that is done, and the total."""


class OpenTeam(Protocol):
    """Opens the team of an evaluation. Returns the player and its description for the manifest."""

    def __call__(
        self, config: EvalConfig, spec: AgentSpec
    ) -> AbstractAsyncContextManager[tuple[Player, dict[str, Any]]]:
        """Open the team. It is closed at the end of the block."""
        ...


async def run_job(
    config: EvalConfig,
    *,
    open_team: OpenTeam | None = None,
    open_harness: Callable[..., HarnessPlayer] = HarnessPlayer,
    on_progress: OnProgress | None = None,
    on_verdict: OnVerdict | None = None,
) -> Metrics:
    """Run the evaluation of ``config``, with best-of-k and agreement of judges. See :func:`afm.evaluation.evaluate`.

    Args:
        open_team: Needed if a team answers.
        open_harness: Makes the player of ``harness``, with the arguments of :class:`HarnessPlayer`. Needed for a team.

    Raises:
        ConfigError: Settings of agent, model, tools or rewards are wrong.
        DataError: A row of the data is wrong.
    """
    tasks = load_tasks(config)
    agents = row_agents(config, tasks)
    first = agents.routes.first
    async with AsyncExitStack() as opened:
        opened.push_async_callback(agents.close)
        model: TokenModel | None = None
        team: Player | None = None
        sources = sources_of(config)
        if config.team is None:
            model = open_model(config)
            opened.push_async_callback(model.close)
        elif open_team is not None:
            team, described = await opened.enter_async_context(open_team(config, first.declared))
            sources = sources.model_copy(update={"team": described})
        conditions = conditions_of(config, agents, sources, model=model)
        if config.harness is not None and model is not None:
            prompt = agents.prompts[first.name]
            reward = agents.rewards[first.name]
            player = open_harness(
                config.harness, first.declared, model, reward, conditions.sampling, prompt.messages
            )
            opened.push_async_callback(player.close)
            model, team = None, player
        saved = config.output_dir / CONFIG_FILE
        if not saved.exists() or not holds_episodes(config.output_dir):
            replace_text(saved, dump_config(config, config.output_dir))
        metrics = await evaluate(
            tasks,
            first.declared,
            model,
            agents.tools[first.name],
            agents.rewards[first.name],
            config.output_dir,
            conditions,
            parallel=config.parallel,
            failures=FailurePolicy(config.retries, config.max_failed_share),
            keep_tokens=config.keep_tokens,
            team=team,
            on_progress=on_progress,
        )
    replace_text(saved, dump_config(config, config.output_dir))
    return await _judged_further(config, metrics, on_verdict)


async def _judged_further(config: EvalConfig, metrics: Metrics, on_verdict: OnVerdict | None) -> Metrics:
    """Add best-of-k and agreement of judges to a finished evaluation."""

    def progress_of(what: str) -> OnProgress | None:
        return None if on_verdict is None else partial(on_verdict, what)

    best_of, _ = config.choosing()
    if best_of is not None:
        metrics = await choose(config.output_dir, best_of, on_progress=progress_of("choices"))
    again, _ = config.agreeing()
    if again is not None:
        metrics = await agree(config.output_dir, again, on_progress=progress_of("second opinions"))
    return metrics


def row_agents(config: EvalConfig, tasks: Sequence[Task], *, opened: bool = True) -> RowAgents:
    """Return every agent with what its episodes need. A single agent has the empty key.

    Args:
        opened: Whether to open tools and rewards. A team has its own tools.

    Raises:
        ConfigError: Settings of agents, tools, rewards or prompts are wrong.
        DataError: A task matches no agent, or a row holds no prompt.
    """
    routes = config.routes()
    own = tasks_by_agent(config, routes, tasks)
    prompts = {
        route.name: checked_prompts(config, route, own[route.name]).source
        if config.team is None
        else PromptSource()
        for route in routes
    }
    tools = Opened(lambda source: load_tools(source) if source is not None and config.team is None else {})
    rewards = Opened(load_reward)
    before = config.routes(with_tools=True) if config.without_tools else ()
    return RowAgents(
        routes,
        {route.name: tools.of(config.tools_in_use(route)) for route in routes} if opened else {},
        {route.name: rewards.of(route.rewards) for route in routes} if opened else {},
        prompts,
        {now.declared.name: was.declared for now, was in zip(routes, before, strict=False)},
    )


def tasks_by_agent(config: EvalConfig, routes: Routes, tasks: Sequence[Task]) -> dict[str, list[Task]]:
    """Return the tasks of each agent, by key in ``agents:``. Logs a warning for patterns that match no task.

    Raises:
        DataError: A task matches no agent.
    """
    if not routes.by_row:
        return {routes.first.name: list(tasks)}
    kinds = Counter((task.data_source, task.ability) for task in tasks)
    for warning in routes.check(kinds, ", ".join(map(str, config.data))):
        _LOG.warning("%s", warning)
    own: dict[str, list[Task]] = {route.name: [] for route in routes}
    for task in tasks:
        own[routes.of(task.data_source, task.ability).name].append(task)
    return own


def checked_prompts(config: EvalConfig, route: Route, tasks: Sequence[Task]) -> RunPrompts:
    """Return the prompts of an agent's tasks, after a check that the model was trained with them.

    For a model at an address, the folder of its tokenizer is checked. An agent without its tools, or with tools that
    are new to the model, differs from training on purpose.

    Raises:
        ConfigError: The model was trained with another prompt and ``prompt_check`` is on, or the file of ``prompt`` is wrong.
        DataError: A row holds no prompt, but ``prompt: row`` needs it.
    """
    rows = ((f"task {task.id!r}", task.question, task.prompt) for task in tasks)
    changed = route.prompt.mode is PromptMode.OWN and (config.without_tools or config.unseen_tools)
    return run_prompts(
        config.prompt_source(route),
        route.declared,
        rows,
        config.answering.folder or config.answering.tokenizer,
        check=config.prompt_check and not changed,
    )


def load_tasks(config: EvalConfig) -> list[Task]:
    """Return the tasks of all files. An id that occurs in two files gets the name of its file as prefix.

    Raises:
        DataError: A file or row is invalid, or there is no task.
        UsageError: A file is missing.
    """
    tasks: list[Task] = []
    seen: set[str] = set()
    routes = config.routes()
    for path in _files(config):
        rows = read_benchmark(path, reader=config.reader, data_source=config.data_source, routes=routes)
        for task in islice(rows, config.limit):
            if task.id in seen:
                task = task.model_copy(update={"id": f"{path.stem}/{task.id}"})
            seen.add(task.id)
            tasks.append(task)
    if not tasks:
        raise DataError(f"no task in {', '.join(map(str, config.data))}; expected at least one")
    return tasks


def _files(config: EvalConfig) -> list[Path]:
    for place in config.data:
        name = config.benchmark or place.stem
        if name in BENCHMARKS | READ_AS_PUBLISHED and not place.exists():
            raise (BENCHMARKS | READ_AS_PUBLISHED)[name].missing(place)
        if not place.exists():
            beside = exists_next_to(place, config.recipe_file)
            why = "no such file or folder" if beside else no_such_file(place, "file or folder")
            raise UsageError(f"data: {place}: {why}{beside or '; give questions with data=FILE'}")
    return [file for place in config.data for file in task_files(place)]


def check_model(config: EvalConfig) -> None:
    """Raise UsageError if the folder of ``model`` holds none."""
    folder = config.model.folder if config.model is not None else None
    if folder is not None and (why := lacks_model(folder)):
        expected = "expected a model's folder or an http(s) address"
        raise UsageError(
            f"model.path: {folder}: {why}; {expected}{exists_next_to(folder, config.recipe_file)}"
            f"{fetch_advice(str(folder))}"
        )


def open_model(config: EvalConfig) -> TokenModel:
    """Load the model of ``config``, or connect to its server."""
    check_model(config)
    settings = config.answering
    return load_model(
        settings.path,
        name=settings.name,
        tokenizer=settings.tokenizer,
        context_tokens=settings.context_tokens,
        threads=settings.threads,
        dtype=settings.dtype,
        max_batch=config.parallel if settings.folder is None else settings.max_batch,
        seed=config.seed,
        chat=settings.chat,
        request=settings.request,
        tool_roles=_tool_purposes(config) if settings.chat is not None else None,
    )


def _tool_purposes(config: EvalConfig) -> dict[str, str]:
    """Return tag and description of each tool role, for native tool calls."""
    spec = config.routes().first.declared
    return {tag: f"{spec.roles[tag].purpose} {spec.roles[tag].format}".strip() for tag in spec.tool_roles}


def sources_of(config: EvalConfig) -> Sources:
    """Describe model, tools, rewards and data for the manifest. Of several agents the first counts."""
    first = config.routes().first
    return Sources(
        model=config.model.path if config.model is not None else None,
        harness=None if config.harness is None else config.harness.model_dump(mode="json"),
        tools=content_of(config.tools_in_use(first), "tools"),
        reward=with_judge_text(content_of(first.rewards, "rewards")),
        data=tuple(str(path) for path in config.data),
        benchmark=config.benchmark,
        parallel=config.parallel,
        prices=prices_of(config),
    )


def prices_of(config: EvalConfig) -> Prices | None:
    """Return ``prices``, with the price of the judge from the rewards.

    Raises:
        ConfigError: A price is for a tool that the agent does not call.
    """
    if config.prices is None:
        return None
    routes = config.routes(with_tools=True)
    prices = config.prices.checked({tool for spec in routes.specs for tool in spec.tool_roles.values()})
    for route in routes:
        if prices.judge is None and route.rewards is not None:
            label, data = read_mapping(route.rewards, "reward")
            known = validated(RewardSettings, data, label).judge.price_per_million_tokens
            prices = prices.model_copy(update={"judge": known})
    return prices


def conditions_of(
    config: EvalConfig, agents: RowAgents, sources: Sources, *, model: TokenModel | None = None
) -> Conditions:
    """Return what the scores depend on. The context of ``model`` limits generations that have no other limit."""
    first, sampling = agents.routes.first, config.sampling
    room = model.context_tokens if model is not None else 1
    return Conditions(
        SamplingParams(
            max_new_tokens=sampling.max_new_tokens or agents.routes.max_response_tokens or room,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        ),
        limits=first.limits,
        rounds=config.rounds,
        seed=config.seed,
        prompt=agents.prompts[first.name] if config.team is None else None,
        protocol=config.published_protocol(),
        original=agents.originals.get(first.declared.name),
        unseen=config.unseen_roles(),
        row_agents=agents if agents.routes.by_row else None,
        sources=sources,
    )
