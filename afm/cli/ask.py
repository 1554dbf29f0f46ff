"""``afm ask``: one question, or a whole conversation, answered live."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from afm.cli.options import TrustOption, agent_option, model_option, prompt_option
from afm.errors import ConfigError, DataError, UsageError

if TYPE_CHECKING:
    from afm.agents import AgentSpec, PromptSource
    from afm.evaluation.prices import Prices
    from afm.models import TokenModel
    from afm.tools import Tool


_ModelOption = Annotated[
    str,
    typer.Option(help="Folder of a model or a training run, or a server's address (http://HOST:PORT/v1)."),
]
_QuestionArgument = Annotated[
    str | None,
    typer.Argument(
        help="Question to ask [default: open a chat, or read one question per line from standard input]."
    ),
]
_AgentOption = Annotated[
    str | None,
    typer.Option(help="Shipped agent or YAML [default: the agent in the model's folder]."),
]
_ToolsOption = Annotated[
    Path | None,
    typer.Option(help="YAML of tools [default: the tools in configs/tools that the agent calls]."),
]
_PromptOption = Annotated[
    str,
    typer.Option(
        help="own (the agent's prompt), row (the prompt that the model was trained with), or a text file with {question} in it."
    ),
]
_NoPromptCheckOption = Annotated[
    bool,
    typer.Option("--no-prompt-check", help="Allow a prompt that differs from the one in training."),
]
_TokenizerOption = Annotated[
    Path | None,
    typer.Option(help="Folder of the tokenizer; required with a server's address [default: the model's]."),
]
_ContextOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Limit on tokens of prompt and answer together [default: the model's, or what the server reports].",
    ),
]
_ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="CPU threads, if --model is a folder [default: all cores].")
]
_SaveOption = Annotated[
    Path | None,
    typer.Option(
        help="New JSONL file for the turns; `afm view` shows it [default: not saved].", dir_okay=False
    ),
]
_ResumeOption = Annotated[
    Path | None,
    typer.Option(
        "--continue", help="File of --save whose conversation continues [default: a new one].", dir_okay=False
    ),
]
_PricesOption = Annotated[
    str | None,
    typer.Option(
        metavar="YAML",
        help="Show costs at these prices, in USD per million tokens and per tool call: `{prompt: 0.5, completion: 1.5, "
        "tools: {code: 0.001}}`, or a YAML file with the key `prices` [default: no costs].",
    ),
]
_AsJsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON record per question, and nothing else.")
]


def ask(
    model: _ModelOption,
    question: _QuestionArgument = None,
    agent: _AgentOption = None,
    tools: _ToolsOption = None,
    prompt: _PromptOption = "own",
    no_prompt_check: _NoPromptCheckOption = False,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the episode [default: random].")] = None,
    tokenizer: _TokenizerOption = None,
    model_name: Annotated[
        str | None, typer.Option(help="Model of the server [default: its only one].")
    ] = None,
    context_tokens: _ContextOption = None,
    threads: _ThreadsOption = None,
    save: _SaveOption = None,
    resume: _ResumeOption = None,
    prices: _PricesOption = None,
    as_json: _AsJsonOption = False,
    trust: TrustOption = False,
) -> None:
    """Answer QUESTION with a model, its agent and real tools.

    Every step is shown. Without QUESTION a chat opens, in which the model sees the earlier turns. Ctrl-C stops an
    answer. Ctrl-D ends the chat.

    Example: afm ask "Tom has 57 coins. Tom finds 38 more. How many coins does Tom have?" --model runs/quickstart/rl
    """
    from rich.console import Console

    from afm.cli.ask_chat import ChatSession, chat, open_conversation
    from afm.models import load_model

    if question is not None and not question.strip():
        raise UsageError("QUESTION is empty; leave it out to open a chat")
    spec = _agent(agent, model_option(model))
    source = _prompt(spec, agent, prompt, tokenizer if "://" in model else model, check=not no_prompt_check)
    conversation = open_conversation(spec, save, resume, source)
    known = None if prices is None else _known_prices(prices, spec)
    boxes = _tools(spec, tools, model if agent is None else agent)

    with asyncio.Runner() as runner:
        engine = None
        try:
            engine = load_model(
                model,
                name=model_name,
                tokenizer=tokenizer,
                context_tokens=context_tokens,
                threads=threads,
                seed=None,
            )
            console = None if as_json else Console(highlight=False, soft_wrap=True)
            asker = ChatSession(engine, boxes, conversation, temperature, seed, console, known)
            if question is None:
                chat(asker, runner.run)
            else:
                runner.run(asker.ask(question))
        finally:
            runner.run(_closed([*boxes.values(), *([engine] if engine else [])]))


async def _closed(things: Sequence[Tool | TokenModel]) -> None:
    await asyncio.gather(*(thing.close() for thing in things))


def _agent(agent: str | None, model: str) -> AgentSpec:
    from afm.agents import MODEL_AGENT_FILE, load_agent, model_folder

    own = model_folder(model) / MODEL_AGENT_FILE
    if agent is not None:
        spec = agent_option(agent, model)
        if own.is_file() and (trained := load_agent(own)).digest != spec.digest:
            print(
                f"warning: {model} was trained as agent {trained.name!r} ({trained.digest}), but is asked as agent {spec.name!r} "
                f"({spec.digest}), which has another prompt or other tags; leave --agent out to ask it as it was trained",
                file=sys.stderr,
            )
        return spec
    if own.is_file():
        return load_agent(own)
    raise UsageError(f"{model}: the agent is unknown; give --agent NAME")


def _prompt(
    spec: AgentSpec, agent: str | None, prompt: str, model: str | Path | None, *, check: bool
) -> PromptSource:
    """Return the source of the prompt, after checking that the model was trained with it. ``agent`` is ``--agent``."""
    from afm.agents.prompt_record import run_prompts

    try:
        return run_prompts(prompt_option(prompt), spec, [("--prompt", "?", None)], model, check=check).source
    except DataError:
        raise UsageError(
            "--prompt row: the model's folder holds no record of one prompt; give --prompt FILE with {question}"
        ) from None
    except ConfigError as error:
        differs, of_runs, _ = str(error).partition("; use prompt=")
        if not of_runs:
            raise
        ways = "--prompt FILE (the text that the model was trained with), or --no-prompt-check to ask it all the same"
        leave = "leave --agent out to ask it as it was trained, " if agent is not None else ""
        raise ConfigError(f"{differs}; {leave}add {ways}") from None


def _known_prices(path: str, spec: AgentSpec) -> Prices:
    """Read the prices. Each tool with a price must be one that the agent calls."""
    from afm.evaluation.prices import read_prices

    return read_prices(path).checked(spec.tool_roles.values())


def _tools(spec: AgentSpec, source: Path | None, agent: str) -> dict[str, Tool]:
    """Load the tools in ``source``, or those in ``configs/tools`` that the agent calls."""
    from afm.tools import load_tools
    from afm.tools.registry import default_tools, tools_beside

    if source is not None:
        return load_tools(source)
    try:
        return default_tools(spec)
    except ConfigError as error:
        own = tools_beside(spec, Path(agent)) if Path(agent).exists() else None
        raise UsageError(f"{error}; give --tools {shlex.quote(str(own or 'YAML'))}") from None
