"""The framework from Python: ask, score, mask and evaluate, from a script or a notebook.

All functions are synchronous, and import as ``afm.ask`` and so on. Their work runs on one event loop in a thread of its
own. So they also work where an event loop is already running, as in every notebook. The tools of ``configs/tools`` and
the built-in reward are opened by the first call that needs them, and stay open until the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from afm.agents import AgentSpec, PromptSource, load_agent
from afm.agents.prompt_record import run_prompts
from afm.choices import Boundary
from afm.datasets import Task, read_tasks
from afm.errors import ConfigError
from afm.evaluation.manifest import Conditions, Sources
from afm.evaluation.metrics import Metrics
from afm.evaluation.run import OnProgress
from afm.evaluation.run import evaluate as run_evaluation
from afm.masking import MaskedIds, encode_batch
from afm.models import SamplingParams, TokenModel
from afm.models.tokenizer import ChatTokenizer
from afm.play import ModelPlayer
from afm.rewards import CombinedReward, Reward, Sample, load_reward
from afm.tools import Tool, check_tools
from afm.tools.registry import default_tools
from afm.trajectory import author_segments
from afm.trajectory.record import Record, Verdict

ResultT = TypeVar("ResultT")
AnyAgent = AgentSpec | str | Path
"""An agent, or what :func:`afm.load_agent` takes: a shipped name, a YAML, the folder of a trained model."""
_TASK = "afm.Task(id=..., question=..., ground_truth=..., data_source=...)"


class _OpenParts:
    """Resources that stay open between calls."""

    def __init__(self) -> None:
        self.reward: Reward = load_reward()
        self.tools: dict[frozenset[str], Mapping[str, Tool]] = {}
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="afm-api", daemon=True)
        self.thread.start()
        os.register_at_fork(after_in_child=_session.cache_clear)  # threads do not survive a fork

    def tools_of(self, spec: AgentSpec) -> Mapping[str, Tool]:
        names = frozenset(spec.tool_roles.values())
        if names not in self.tools:
            self.tools[names] = default_tools(spec)
        return self.tools[names]


@cache
def _session() -> _OpenParts:
    return _OpenParts()


def run(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a coroutine of this framework and return its result, for example ``afm.run(model.close())``.

    An interrupt (Ctrl-C, a notebook's stop button) cancels the coroutine and waits until it has ended.

    Raises:
        RuntimeError: The call is inside a coroutine that :func:`run` runs; use ``await`` there.
    """
    session = _session()
    if threading.current_thread() is session.thread:
        coroutine.close()
        raise RuntimeError("afm.run was called inside a coroutine that it runs; write `await` there")
    tasks: list[asyncio.Task[Any]] = []

    async def supervised() -> ResultT:
        tasks.append(asyncio.current_task())  # type: ignore[arg-type]  # a coroutine of a running loop has one
        return await coroutine

    result = asyncio.run_coroutine_threadsafe(supervised(), session.loop)
    try:
        return result.result()
    except KeyboardInterrupt:
        session.loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
        with contextlib.suppress(BaseException):
            result.result()
        raise


def ask(
    agent: AnyAgent,
    model: TokenModel,
    question: str | Task,
    *,
    tools: Mapping[str, Tool] | None = None,
    temperature: float = 1.0,
    seed: int | None = None,
) -> Record:
    """Play one episode: ``model`` works on a question as ``agent``, with real tools.

    Args:
        agent: An agent, or what :func:`afm.load_agent` takes.
        question: A text, or a task. The record keeps the gold answer and the data source of a task.
        tools: Tools by name, as from :func:`afm.load_tools`; by default those in ``configs/tools`` that the agent calls.
        temperature: Sampling temperature; 0 is greedy.
        seed: Makes the episode reproducible. By default it is random. The record contains it.

    Raises:
        ConfigError: A value is of another kind, a tool is missing, or the model was trained with another prompt.
        EngineError: The model failed.
    """
    agent, model = _agent(agent), _model(model)
    task = question if isinstance(question, Task) else Task(id="ask", question=question)
    player = ModelPlayer(
        agent,
        model,
        _tools(agent, tools),
        _sampling(agent, model, temperature),
        keep_tokens=model.token_exact,
        prompt=_prompt(agent, model, [task]),
    )
    return run(player.play(task.id, task, random.getrandbits(31) if seed is None else seed))


def score(
    agent: AnyAgent, response: Record | str, task: Task | None = None, *, reward: Reward | None = None
) -> Verdict:
    """Score a response with a reward. ``score`` of the verdict is ``None`` if the reward abstains.

    Args:
        agent: As in :func:`ask`.
        response: A record, or the text of one with its tags.
        task: Has the gold answer and the data source, which chooses the scorer. A record may have its own.
        reward: A reward, as from :func:`afm.load_reward`; by default the built-in scorers by data source.

    Raises:
        ConfigError: A text comes without a task, or the data source has no scorer.
    """
    agent = _agent(agent)
    asked = response if isinstance(response, Record) and task is None else task
    if asked is None:
        raise ConfigError("a text alone has no gold answer; expected score(agent, text, task)")
    if not isinstance(asked, Task | Record):
        raise _wrong("task", asked, _TASK)
    tokens: dict[str, int] = {}
    if isinstance(response, Record):
        written, observed = response.cost.agent_tokens, response.cost.observation_tokens
        tokens = {"agent_tokens": written, "response_tokens": written + observed}
    details = {} if task is None else task.extra_info
    sample = Sample.of(agent, asked, _segments(agent, response), extra_info=details, **tokens)
    return run(_reward(reward).score(sample))


def mask(
    agent: AnyAgent,
    response: Record | str,
    tokenizer: Any,
    *,
    boundary: Boundary = Boundary.SPLIT,
    roles_without_loss: Sequence[str] = (),
) -> MaskedIds:
    """Return the token ids of a response and its loss mask: tokens that the agent wrote are trained on.

    Args:
        agent: As in :func:`ask`.
        response: A record, or the text of one with its tags.
        tokenizer: A fast Hugging Face tokenizer, or the folder of one.
        boundary: Treatment of a token with characters of both agent and environment.
        roles_without_loss: Further roles, of the agent, that are not trained on.

    Raises:
        ConfigError: The folder holds no tokenizer, or it is not a fast one.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = ChatTokenizer.load(tokenizer).backend
    segments = _segments(_agent(agent), response)
    return encode_batch(tokenizer, [segments], boundary, roles_without_loss=roles_without_loss)[0]


def evaluate(
    agent: AnyAgent,
    model: TokenModel,
    tasks: Iterable[Task] | str | Path,
    output_dir: str | Path,
    *,
    tools: Mapping[str, Tool] | None = None,
    reward: Reward | None = None,
    rounds: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    parallel: int = 64,
    on_progress: OnProgress | None = None,
) -> Metrics:
    """Let ``model`` work on every task, judge the episodes, and write a run for ``afm view`` and ``afm report``.

    To resume an interrupted run, repeat the call. :func:`afm.evaluation.evaluate` is the coroutine behind it, with all
    options.

    Args:
        agent: As in :func:`ask`.
        tasks: Tasks, or a file that :func:`afm.read_tasks` reads.
        tools: As in :func:`ask`.
        reward: As in :func:`score`.
        rounds: Episodes per task; more than one also gives pass@k.
        parallel: Number of episodes at the same time.

    Raises:
        ConfigError: A value is of another kind, there is no task, a tool is missing, the model was trained with another
            prompt, or ``output_dir`` holds another run.
        EngineError: Too many episodes failed.
    """
    agent, model, questions = _agent(agent), _model(model), _questions(tasks)
    boxes, judge = _tools(agent, tools), _reward(reward)
    conditions = Conditions(
        _sampling(agent, model, temperature),
        rounds=rounds,
        seed=seed,
        prompt=_prompt(agent, model, questions),
        sources=_sources(model, boxes, judge),
    )
    job = (questions, agent, model, boxes, judge, output_dir, conditions)
    return run(run_evaluation(*job, parallel=parallel, on_progress=on_progress))


def _wrong(what: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{what}: got {value!r:.80} ({type(value).__name__}), expected {expected}")


def _agent(agent: object) -> AgentSpec:
    if isinstance(agent, str | Path):
        return load_agent(agent)
    if not isinstance(agent, AgentSpec):
        raise _wrong("agent", agent, "an agent, or what afm.load_agent takes, for example 'math'")
    return agent


def _model(model: object) -> TokenModel:
    if not isinstance(model, TokenModel):
        raise _wrong("model", model, "a model, for example afm.load_model('runs/quickstart/rl')")
    return model


def _reward(reward: Reward | None) -> Reward:
    if reward is not None and not hasattr(reward, "score"):
        raise _wrong("reward", reward, "a reward, for example afm.load_reward('configs/rewards/math.yaml')")
    return _session().reward if reward is None else reward


def _questions(tasks: Iterable[Task] | str | Path) -> list[Task]:
    questions = list(read_tasks(tasks) if isinstance(tasks, str | Path) else tasks)
    for task in questions:
        if not isinstance(task, Task):
            raise _wrong("tasks", task, f"{_TASK}; a text alone has no gold answer to score with")
    if not questions:
        raise ConfigError(f"tasks: got none, expected at least one {_TASK}")
    return questions


def _tools(agent: AgentSpec, tools: Mapping[str, Tool] | None) -> Mapping[str, Tool]:
    if tools is None:
        return _session().tools_of(agent)
    if not isinstance(tools, Mapping):
        raise _wrong(
            "tools", tools, "tools by name, for example afm.load_tools('configs/tools/code_executor.yaml')"
        )
    check_tools(f"agent {agent.name!r}", agent.tool_roles.values(), tools)
    return tools


def _sampling(agent: AgentSpec, model: TokenModel, temperature: float) -> SamplingParams:
    return SamplingParams(agent.limits.max_response_tokens or model.context_tokens, temperature)


def _prompt(agent: AgentSpec, model: TokenModel, tasks: Iterable[Task]) -> PromptSource:
    rows = ((f"task {task.id!r}", task.question, task.prompt) for task in tasks)
    try:
        return run_prompts(PromptSource(), agent, rows, model.folder).source
    except ConfigError as error:
        differs, of_runs, _ = str(error).partition("; use prompt=")
        if not of_runs:
            raise
        raise ConfigError(
            f"{differs}; use the agent of the model: afm.load_agent({str(model.folder)!r})"
        ) from None


def _sources(model: TokenModel, tools: Mapping[str, Tool], reward: Reward) -> Sources:
    """Return the manifest's entries for parts that were given as objects."""
    kinds = [{"name": name, "class_name": _class_name(tool)} for name, tool in sorted(tools.items())]
    content = {"class_name": _class_name(reward)}
    if isinstance(reward, CombinedReward):
        content = reward.settings.model_dump(mode="json", exclude_defaults=True)
    folder = None if model.folder is None else str(model.folder)
    return Sources(model=folder, tools={"tools": kinds}, reward=content or None)


def _class_name(part: object) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"


def _segments(agent: AgentSpec, response: Record | str) -> Any:
    if not isinstance(response, Record | str):
        raise _wrong("response", response, "a record, or the text of one with its tags")
    return response.segments if isinstance(response, Record) else author_segments(response, agent)
