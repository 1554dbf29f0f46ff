"""``afm data queries``: the questions that reinforcement is worth it for."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.cli.options import OnBadRows, agent_option, model_option
from afm.errors import ConfigError, DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from afm.agents import AgentSpec
    from afm.datasets import Task
    from afm.distill.queries.askers import QuestionAsker
    from afm.distill.queries.sampling import OnSample, QueryConfig, QuerySettings
    from afm.distill.queries.select import QuerySummary
    from afm.rewards import Reward
    from afm.terminal import ProgressView
    from afm.tools import Tool


_NAMED = 5


class QueryPreset(StrEnum):
    """Keys of :data:`afm.distill.queries.PRESETS`."""

    QA = "qa"
    CODE = "code"


_TasksArgument = Annotated[
    list[Path], typer.Argument(help="Questions as JSONL or parquet.", exists=True, dir_okay=False)
]
_ModelOption = Annotated[
    str, typer.Option(help="A model's folder, or http://HOST:PORT/v1 (key: AFM_MODEL_API_KEY).")
]
_PresetOption = Annotated[
    QueryPreset | None,
    typer.Option(
        help="qa (default): 32 samples without tools, keep r_q <= 0.3. code: 8 with tools, drop what all solve."
    ),
]
_ConfigOption = Annotated[
    Path | None,
    typer.Option(
        help="In place of a preset a YAML such as configs/queries/web.yaml; other options override it.",
        exists=True,
        dir_okay=False,
    ),
]
_SftOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="SFT data whose questions must not occur; may be given several times.",
        exists=True,
        dir_okay=False,
    ),
]
_TokenizerOption = Annotated[
    Path | None,
    typer.Option(help="Folder of the served model's tokenizer; needed for preset code.", exists=True),
]
_ToolsOption = Annotated[
    Path | None,
    typer.Option(help="Tools YAML; by default the sandboxed code tool.", exists=True, dir_okay=False),
]
_TargetOption = Annotated[
    int | None, typer.Option(min=1, help="Keep so many, drawn in proportion to the data sources.")
]
_ParallelOption = Annotated[
    int | None, typer.Option(min=1, help="Samples taken at the same time. Default: 64.")
]
_TimeoutSOption = Annotated[
    float,
    typer.Option(
        "--timeout", min=0.1, help="Seconds for one reply of a chat endpoint; then it is asked again."
    ),
]
_OnFailedOption = Annotated[
    OnBadRows | None,
    typer.Option(
        help="Drop (default) a question that the model refuses (too long, filtered) while it answers others, or stop."
    ),
]


def queries(
    tasks: _TasksArgument,
    out: Annotated[Path, typer.Option(help="Folder for samples, kept and dropped questions.")],
    model: _ModelOption,
    preset: _PresetOption = None,
    config: _ConfigOption = None,
    agent: Annotated[str | None, typer.Option(help="By default mhqa for qa, code for code.")] = None,
    ability: Annotated[str | None, typer.Option(help="Ask only rows of this ability.")] = None,
    sft: _SftOption = None,
    name: Annotated[str | None, typer.Option(help="Which model of a server that has several.")] = None,
    tokenizer: _TokenizerOption = None,
    tools: _ToolsOption = None,
    reward: Annotated[Path | None, typer.Option(help="Reward YAML of preset code.", exists=True)] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Samples of each question.")] = None,
    max_rate: Annotated[float | None, typer.Option(min=0, max=1, help="Keep r_q up to this.")] = None,
    target: _TargetOption = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Default: 1.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of one sample.")] = None,
    parallel: _ParallelOption = None,
    timeout_s: _TimeoutSOption = 300.0,
    on_failed: _OnFailedOption = None,
    seed: Annotated[int | None, typer.Option(help="Of samples and draw. Default: 0.")] = None,
) -> None:
    """Keep the questions that a model does not answer anyway, by the share of its samples that are right.

    Killed or interrupted, the same command goes on with the next sample. A server is asked for chat completions, or, with
    --tokenizer, for token ids.
    """
    from afm.datasets import read_task_files
    from afm.distill.queries.sampling import FailedQuestions
    from afm.terminal import ProgressView

    chosen = _config(config, preset)
    options = {
        "samples": samples,
        "max_rate": max_rate,
        "max_tokens": max_tokens,
        "target": target,
        "temperature": temperature,
        "parallel": parallel,
        "seed": seed,
        "on_failed": None if on_failed is None else FailedQuestions(on_failed.value),
    }
    settings = chosen.selection.model_copy(
        update={key: value for key, value in options.items() if value is not None}
    )
    sft = sft or chosen.known_files(str(config))
    spec = agent_option(agent or chosen.agent)
    setup = _Setup(spec, settings, model_option(model), name, tokenizer, tools, reward, timeout_s)
    rows = _of_ability(list(read_task_files(tasks)), ability or chosen.ability)
    view = ProgressView()

    def show(done: int, total: int) -> None:
        view.update("samples", done, total)

    summary = asyncio.run(_run(setup, rows, out, tasks, sft, show))
    _print_summary(summary, view, compared=bool(sft) or settings.with_tools)


def _print_summary(summary: QuerySummary, view: ProgressView, *, compared: bool) -> None:
    view.line(
        f"{summary.path}: {summary.kept} of {summary.tasks} questions kept, {summary.sampled} samples taken"
    )
    if not compared:
        print("  without --sft nothing was compared with the SFT data")
    if summary.resumed:
        print(f"  samples of earlier starts: {summary.resumed}")
    for reason, count in sorted(summary.dropped.items()):
        print(f"  dropped: {count} {reason}")
    for name, reason in list(summary.unsampled.items())[:_NAMED]:
        print(f"  cannot be sampled: {name!r}: {reason}")


def _config(file: Path | None, preset: QueryPreset | None) -> QueryConfig:
    from afm.configuration import read_file, validated
    from afm.distill.queries.sampling import PRESETS, QueryConfig

    if file is None:
        name = preset or QueryPreset.QA
        agent = {QueryPreset.QA: "mhqa", QueryPreset.CODE: "code"}[name]
        return QueryConfig(**PRESETS[name].model_dump(), agent=agent)
    if preset is not None:
        raise UsageError("--preset and --config: give one of them")
    return validated(QueryConfig, read_file(file, "a selection of queries"), str(file))


def _of_ability(rows: list[Task], ability: str | None) -> list[Task]:
    found = rows if ability is None else [task for task in rows if task.ability == ability]
    if not found:
        others = ", ".join(sorted({repr(task.ability) for task in rows})) or "no rows"
        raise DataError(f"no row of ability {ability!r}; there are {others}; choose with --ability")
    return found


class _Setup:
    """What the command line says about the model and how it is asked."""

    def __init__(
        self,
        spec: AgentSpec,
        settings: QuerySettings,
        model: str,
        name: str | None,
        tokenizer: Path | None,
        tools: Path | None,
        reward: Path | None,
        timeout_s: float,
    ) -> None:
        self.spec, self.settings = spec, settings
        self.model, self.name, self.tokenizer = model, name, tokenizer
        self.tools, self.reward, self.timeout_s = tools, reward, timeout_s

    def asker(self, reward: Reward) -> QuestionAsker:
        """Loads the model, or connects to it."""
        from afm.agents.spec import without_tools
        from afm.distill.queries.askers import EpisodeAsker, by_exact_match, by_reward
        from afm.models import SamplingParams, load_model

        if "://" in self.model and self.tokenizer is None:
            return self._chat()
        spec = self.spec if self.settings.with_tools else without_tools(self.spec)
        judge = by_reward(reward) if self.settings.with_tools else by_exact_match
        model = load_model(
            self.model, name=self.name, tokenizer=self.tokenizer, max_batch=self.settings.parallel
        )
        tokens = self.settings.max_tokens or spec.limits.max_response_tokens or model.context_tokens
        sampling = SamplingParams(tokens, temperature=self.settings.temperature)
        tools = self._tools() if spec.tool_roles else {}
        return EpisodeAsker(spec, model, tools, judge, sampling, self._told(with_tools=bool(tools)))

    def _chat(self) -> QuestionAsker:
        from afm.agents.spec import without_tools
        from afm.distill.queries.askers import ChatAsker, by_exact_match
        from afm.endpoints.chat import EndpointSettings
        from afm.models.openai import served_models

        if self.settings.with_tools:
            raise UsageError(
                "--preset code with a server needs --tokenizer DIR (so does with_tools: true in --config): episodes are "
                "made of token ids"
            )
        name = self.name
        if name is None:
            served = served_models(self.model)
            if len(served) != 1:
                raise UsageError(f"--name: {self.model} serves {', '.join(served) or 'no model'}")
            [name] = served
        return ChatAsker(
            without_tools(self.spec),
            self.model,
            name,
            by_exact_match,
            temperature=self.settings.temperature,
            max_tokens=self.settings.max_tokens or 2048,
            endpoint=EndpointSettings(max_parallel=self.settings.parallel, timeout_s=self.timeout_s),
        )

    def _told(self, *, with_tools: bool) -> dict[str, str]:
        """What decides about samples beside agent and model; of the reward, all but what is made of its part ``correct``."""
        from afm.configuration import read_mapping, validated
        from afm.distill.queries.askers import settings_digest
        from afm.rewards import RewardSettings

        told = {}
        if self.settings.with_tools:
            label, data = read_mapping(self.reward or {}, "reward")
            settings = validated(RewardSettings, data, label)
            told["reward_digest"] = settings_digest(
                settings.model_dump(mode="json", exclude={"formula", "overlong"})
            )
        if with_tools:
            told["tools_digest"] = settings_digest(read_mapping(self._tools_file(), "tools")[1])
        return told

    def _tools_file(self) -> Path:
        from afm.cli.options import configs_folder

        return self.tools or configs_folder() / "tools/code_executor.yaml"

    def _tools(self) -> dict[str, Tool]:
        from afm.tools import load_tools

        found = load_tools(self._tools_file())
        if missing := sorted(set(self.spec.tool_roles.values()) - set(found)):
            raise ConfigError(f"agent {self.spec.name!r} needs the tools {', '.join(missing)}; give --tools")
        return {name: found[name] for name in set(self.spec.tool_roles.values())}


async def _run(
    setup: _Setup, tasks: Sequence[Task], out: Path, files: list[Path], sft: list[Path], show: OnSample
) -> QuerySummary:
    from afm.distill.queries.select import known_questions, select_queries
    from afm.rewards import load_reward

    known = known_questions(sft)
    reward = load_reward(setup.reward)
    try:
        asker = setup.asker(reward)
        try:
            return await select_queries(
                tasks, asker, out, setup.settings, known=known, inputs=[*files, *sft], on_sample=show
            )
        finally:
            await asker.close()
    finally:
        await reward.close()
