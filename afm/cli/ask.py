"""``afm ask``: one question, answered live."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afm.cli.options import given_agent, given_model
from afm.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from afm.agents import AgentSpec, RoleKind
    from afm.rollout import Episode, EpisodeEvent
    from afm.tools import Tool

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    model: Annotated[str, typer.Option(help="Folder of a model, or the address of a server.")],
    agent: Annotated[
        str | None,
        typer.Option(help="Agent: a shipped name or a YAML; default: the one in the model's folder."),
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(help="YAML of tools; default: the ones in configs/tools that the agent calls."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Makes the episode reproducible.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder of the tokenizer; required with a server's address.")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="Which of the server's models.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads for a model's folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one record line and nothing else.")] = False,
) -> None:
    """Let a model work on QUESTION as an agent with real tools, and show everything it does.

    Example: afm ask "Tom has 12 coins and finds 30. How many?" --agent math --model runs/quickstart/rl
    """
    if not question.strip():
        raise UsageError("the question is empty")
    spec = _agent(agent, given_model(model))
    boxes = _tools(spec, tools)

    async def work() -> None:
        from afm.models import load_model

        engine = await asyncio.to_thread(
            load_model, model, name=model_name, tokenizer=tokenizer, threads=threads, seed=None
        )
        try:
            await _ask(question, spec, engine, boxes, temperature=temperature, seed=seed, as_json=as_json)
        finally:
            await asyncio.gather(engine.close(), *(tool.close() for tool in boxes.values()))

    asyncio.run(work())


async def _ask(
    question: str,
    spec: AgentSpec,
    engine: Any,
    boxes: Mapping[str, Tool],
    *,
    temperature: float,
    seed: int | None,
    as_json: bool,
) -> None:
    from rich.console import Console

    from afm.models import SamplingParams
    from afm.rollout import episode_record, run_episode

    console = Console(highlight=False, soft_wrap=True)
    episode = await run_episode(
        spec,
        engine,
        boxes,
        question,
        sampling=SamplingParams(engine.context_tokens, temperature=temperature),
        seed=seed,
        on_event=None if as_json else lambda event: _show(event, spec, console),
    )
    if as_json:
        record = episode_record(episode, spec, id="ask", question=question, model=engine.name, seed=seed)
        print(record.model_dump_json())
    else:
        _summarise(episode, spec, console)


def _agent(agent: str | None, model: str) -> AgentSpec:
    from afm.agents import MODEL_AGENT_FILE, load_agent, model_folder

    own = model_folder(model) / MODEL_AGENT_FILE
    if agent is not None:
        return given_agent(agent, model)
    if own.is_file():
        return load_agent(own)
    raise UsageError(f"{model} does not say which agent it is; give --agent NAME")


def _tools(spec: AgentSpec, source: Path | None) -> dict[str, Tool]:
    """The tools of ``source``, or from ``configs/tools`` those that the agent calls."""
    from afm.cli.project import configs_folder
    from afm.configuration import read_mapping
    from afm.tools import load_tools

    if source is not None:
        return load_tools(source)
    needed = set(spec.tool_roles.values())
    entries: dict[str, Any] = {}
    for file in sorted((configs_folder() / "tools").glob("*.yaml")) if needed else []:
        for entry in read_mapping(file, "tools")[1].get("tools", []):
            entries.setdefault(entry["tool_schema"]["function"]["name"], entry)
    if missing := sorted(needed - set(entries)):
        raise UsageError(
            f"agent {spec.name!r} calls {', '.join(missing)}, which configs/tools does not hold; give --tools YAML"
        )
    return load_tools({"tools": [entries[name] for name in sorted(needed)]})


def _show(event: EpisodeEvent, spec: AgentSpec, console: Console) -> None:
    from rich.text import Text

    from afm.rollout import CallStarted, TextWritten

    if isinstance(event, TextWritten):
        style = _style(spec.roles[event.role].kind) if event.role else ""
        console.print(Text(_CONTROL.sub("\ufffd", event.text), style), end="")
    elif isinstance(event, CallStarted) and console.is_terminal:
        console.print(Text(f" ({event.tool} is working)", "dim italic"), end="")


def _style(kind: RoleKind) -> str:
    from afm.agents import RoleKind

    styles = {
        RoleKind.THOUGHT: "dim",
        RoleKind.TEXT: "magenta",
        RoleKind.TOOL: "cyan",
        RoleKind.OBSERVATION: "green",
        RoleKind.ANSWER: "bold yellow",
    }
    return styles[kind]


def _summarise(episode: Episode, spec: AgentSpec, console: Console) -> None:
    from rich.text import Text

    from afm.trajectory import answers

    cost = episode.cost
    found = " | ".join(answers(episode.segments, spec))
    console.print()
    console.print(Text(f"answer: {_CONTROL.sub(' ', found) or 'none'} (stopped: {episode.stop})", "bold"))
    console.print(
        Text(
            f"cost: {cost.agent_tokens} tokens written and {cost.observation_tokens} observed after a prompt of "
            f"{cost.prompt_tokens}, tool calls: {cost.tool_calls} ({cost.tool_failures} failed), "
            f"{cost.wall_seconds:.1f} s",
            "dim",
        )
    )
