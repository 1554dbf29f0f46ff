"""What sub-commands have in common about their options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from afm.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from afm.agents import AgentSpec, PromptSource


def given_agent(name: str, model: str | Path | None = None) -> AgentSpec:
    """The agent that ``--agent`` names; one of that name that ``model`` brings along wins.

    Raises:
        UsageError: There is no such agent, or its YAML is wrong.
    """
    from afm.agents import agent_of_model, load_agent

    try:
        return load_agent(name) if model is None else agent_of_model(model, name)
    except ConfigError as error:
        raise UsageError(f"--agent {name}: {error}") from None


def given_prompt(prompt: str) -> PromptSource:
    """Where ``--prompt`` says that prompts come from.

    Raises:
        UsageError: There is no such file, or it is no prompt.
    """
    from afm.agents import PromptSource

    try:
        return PromptSource.load(prompt)
    except ConfigError as error:
        raise UsageError(f"--prompt {prompt}: {error}") from None


def given_model(model: str) -> str:
    """The folder or address that ``--model`` names.

    Raises:
        UsageError: It is neither an address nor a folder that holds a model.
    """
    from afm.agents import model_folder

    if "://" not in model and not (model_folder(model) / "config.json").is_file():
        found = "holds no model (config.json)" if Path(model).is_dir() else "is no folder"
        raise UsageError(
            f"--model {model}: {found}; expected a model's folder, a run, or http://HOST:PORT/v1"
        )
    return model
