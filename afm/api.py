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

from afm.agents import AgentSpec, PromptSource
from afm.agents.prompt_record import run_prompts
from afm.choices import Boundary
from afm.datasets import Task
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
    agent: AgentSpec,
    model: TokenModel,
    question: str | Task,
    *,
    tools: Mapping[str, Tool] | None = None,
    temperature: float = 1.0,
    seed: int | None = None,
) -> Record:
    """Play one episode: ``model`` works on a question as ``agent``, with real tools.

    Args:
        question: A text, or a task. The record keeps the gold answer and the data source of a task.
        tools: Tools by name, as from :func:`afm.load_tools`; by default those in ``configs/tools`` that the agent calls.
        temperature: Sampling temperature; 0 is greedy.
        seed: Makes the episode reproducible. By default it is random. The record contains it.

    Raises:
        ConfigError: A tool is missing, or the model was trained with another prompt.
        EngineError: The model failed.
    """
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
    agent: AgentSpec, response: Record | str, task: Task | None = None, *, reward: Reward | None = None
) -> Verdict:
    """Score a response with a reward. ``score`` of the verdict is ``None`` if the reward abstains.

    Args:
        response: A record, or the text of one with its tags.
        task: Has the gold answer and the data source, which chooses the scorer. A record may have its own.
        reward: A reward, as from :func:`afm.load_reward`; by default the built-in scorers by data source.

    Raises:
        ConfigError: A text comes without a task, or the data source has no scorer.
    """
    asked = response if isinstance(response, Record) and task is None else task
    if asked is None:
        raise ConfigError("a text alone has no gold answer; expected score(agent, text, task)")
    tokens: dict[str, int] = {}
    if isinstance(response, Record):
        written, observed = response.cost.agent_tokens, response.cost.observation_tokens
        tokens = {"agent_tokens": written, "response_tokens": written + observed}
    details = {} if task is None else task.extra_info
    sample = Sample.of(agent, asked, _segments(agent, response), extra_info=details, **tokens)
    return run((reward or _session().reward).score(sample))


def mask(
    agent: AgentSpec,
    response: Record | str,
    tokenizer: Any,
    *,
    boundary: Boundary = Boundary.SPLIT,
    roles_without_loss: Sequence[str] = (),
) -> MaskedIds:
    """Return the token ids of a response and its loss mask: tokens that the agent wrote are trained on.

    Args:
        response: A record, or the text of one with its tags.
        tokenizer: A fast Hugging Face tokenizer, or the folder of one.
        boundary: Treatment of a token with characters of both agent and environment.
        roles_without_loss: Further roles, of the agent, that are not trained on.

    Raises:
        ConfigError: The folder holds no tokenizer, or it is not a fast one.
    """
    if isinstance(tokenizer, str | Path):
        tokenizer = ChatTokenizer.load(tokenizer).backend
    segments = _segments(agent, response)
    return encode_batch(tokenizer, [segments], boundary, roles_without_loss=roles_without_loss)[0]


def evaluate(
    agent: AgentSpec,
    model: TokenModel,
    tasks: Iterable[Task],
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
        tools: As in :func:`ask`.
        reward: As in :func:`score`.
        rounds: Episodes per task; more than one also gives pass@k.
        parallel: Number of episodes at the same time.

    Raises:
        ConfigError: A tool is missing, the model was trained with another prompt, or ``output_dir`` holds another run.
        EngineError: Too many episodes failed.
    """
    questions, boxes, judge = list(tasks), _tools(agent, tools), reward or _session().reward
    conditions = Conditions(
        _sampling(agent, model, temperature),
        rounds=rounds,
        seed=seed,
        prompt=_prompt(agent, model, questions),
        sources=_sources(model, boxes, judge),
    )
    job = (questions, agent, model, boxes, judge, output_dir, conditions)
    return run(run_evaluation(*job, parallel=parallel, on_progress=on_progress))


def _tools(agent: AgentSpec, tools: Mapping[str, Tool] | None) -> Mapping[str, Tool]:
    if tools is None:
        return _session().tools_of(agent)
    check_tools(f"agent {agent.name!r}", agent.tool_roles.values(), tools)
    return tools


def _sampling(agent: AgentSpec, model: TokenModel, temperature: float) -> SamplingParams:
    return SamplingParams(agent.limits.max_response_tokens or model.context_tokens, temperature)


def _prompt(agent: AgentSpec, model: TokenModel, tasks: Iterable[Task]) -> PromptSource:
    rows = ((f"task {task.id!r}", task.question, task.prompt) for task in tasks)
    return run_prompts(PromptSource(), agent, rows, model.folder).source


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
    return response.segments if isinstance(response, Record) else author_segments(response, agent)
