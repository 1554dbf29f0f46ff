"""Loading and saving of agents as YAML: a shipped agent by name, your own by path, or one that extends another."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import yaml

from afm.agents.spec import START, AgentSpec
from afm.configuration import read_extended, validated
from afm.errors import ConfigError, no_such_file, suggestion
from afm.runs.atomic import replace_text

_SHIPPED_FOLDER = Path(__file__).parent
MODEL_AGENT_FILE = "agent.yaml"
"""The file in a trained model's folder that declares its agent."""
MODEL_AGENTS_DIR = "agents"
"""The folder next to it with one ``NAME.yaml`` per agent, for a model that was trained as several agents."""
_ADAPTER_FILE = "adapter_config.json"
"""The settings file that peft writes next to an adapter."""


def shipped_agents() -> tuple[str, ...]:
    """Return the sorted names of the agents in the package."""
    return tuple(sorted(file.stem for file in _SHIPPED_FOLDER.glob("*.yaml")))


def load_agent(name_or_path: str | Path) -> AgentSpec:
    """Load an agent: a shipped one by name, a YAML by path, or the agent of a trained model by the model's folder.

    A YAML may contain ``extends: NAME_OR_PATH``, with paths relative to the file. Mappings are merged key by key.
    Lists and values replace the inherited ones, and ``null`` removes them.

    Raises:
        ConfigError: The agent does not exist, its YAML is invalid or has an unknown key, or it contradicts itself.
    """
    source = _find(name_or_path, Path())
    return _shipped(source) if source.parent == _SHIPPED_FOLDER else _load(source)


def save_agent(spec: AgentSpec, path: Path) -> None:
    """Write ``spec`` as a YAML that :func:`load_agent` reads back. Replaces ``path`` atomically."""
    text = yaml.dump(spec.dump(), Dumper=_BlockDumper, sort_keys=False, allow_unicode=True, width=100)
    replace_text(path, text)


def save_agents(specs: Sequence[AgentSpec], folder: Path) -> None:
    """Write a model's agents: the first to ``agent.yaml``, and several also to one ``agents/NAME.yaml`` each."""
    save_agent(specs[0], folder / MODEL_AGENT_FILE)
    if len(specs) > 1:
        for spec in specs:
            save_agent(spec, folder / MODEL_AGENTS_DIR / f"{spec.name}.yaml")


def saved_agents(folder: Path) -> list[AgentSpec]:
    """Return the agents that :func:`save_agents` wrote, in their order, or an empty list without ``agent.yaml``.

    Raises:
        ConfigError: A file is not a valid declaration.
    """
    first = folder / MODEL_AGENT_FILE
    if not first.is_file():
        return []
    specs = [load_agent(file) for file in (first, *sorted((folder / MODEL_AGENTS_DIR).glob("*.yaml")))]
    return list({spec.name: spec for spec in reversed(specs)}.values())[::-1]


def model_folder(path: str | Path) -> Path:
    """Return the folder that holds the model: ``path``, or its subfolder ``model`` if ``path`` is a training run."""
    folder = Path(path)
    inner = folder / "model"
    return inner if not holds_model(folder) and holds_model(inner) else folder


def holds_model(folder: Path) -> bool:
    """Return whether a folder holds a model or a LoRA adapter."""
    return (folder / "config.json").is_file() or (folder / _ADAPTER_FILE).is_file()


def lacks_model(path: str | Path) -> str:
    """Return why the folder ``path`` holds no model, with the next step; empty if it or its run holds one."""
    folder = Path(path)
    if not folder.is_dir():
        return no_such_file(folder, "folder")
    if holds_model(model_folder(folder)):
        return ""
    if any(next(place.glob("global_step_*"), None) for place in (folder, folder / "checkpoints")):
        return f"holds checkpoints of a training run, export one first: afm export {shlex.quote(str(path))}"
    if (folder / "rl_config.yaml").is_file():
        config = shlex.quote(str(folder / "rl_config.yaml"))
        return f"its training has saved no checkpoint yet; if it has stopped, resume it: afm rl {config}"
    if (folder / "sft_config.yaml").is_file():
        return "its training has not ended; if it has stopped, resume it with the same `afm sft` command"
    return "holds no model (config.json)"


def adapter_base(folder: Path) -> str | None:
    """Return the base model, a folder or a name, of the LoRA adapter in ``folder``, or ``None`` without an adapter.

    Raises:
        ConfigError: The adapter does not name its base model.
    """
    file = folder / _ADAPTER_FILE
    if not file.is_file():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError):
        base = None
    if not base or not isinstance(base, str):
        raise ConfigError(f"{file}: base_model_name_or_path is missing, expected the model of the adapter")
    return base


def agent_of_model(model_dir: str | Path, name: str) -> AgentSpec:
    """Return the agent called ``name`` from a model's folder, or else load ``name`` with :func:`load_agent`."""
    saved = saved_agents(model_folder(model_dir))
    return next((spec for spec in saved if spec.name == name), None) or load_agent(name)


def _load(source: Path) -> AgentSpec:
    return validated(AgentSpec, read_extended(source, "agent settings", find=_find), str(source))


_shipped = lru_cache(maxsize=None)(_load)
"""Every row names its agent, and the files of the package do not change while it runs."""


def _find(name_or_path: str | Path, base: Path) -> Path:
    name = str(name_or_path)
    if re.fullmatch(r"[a-z][a-z0-9_]*", name) and not isinstance(name_or_path, Path):
        if name in shipped_agents():
            return _SHIPPED_FOLDER / f"{name}.yaml"
        own = base / f"{name}.yaml"
        hint = f"did you mean {own}?" if own.is_file() else suggestion(name, shipped_agents())
        raise ConfigError(f"agent {name!r} is not shipped ({hint}); or pass the path of a YAML")
    path = base / Path(name_or_path).expanduser()
    if (trained := model_folder(path) / MODEL_AGENT_FILE).is_file():
        return trained
    if not path.is_file():
        if name.lower() in shipped_agents():
            raise ConfigError(f"agent {name!r} is not shipped; did you mean {name.lower()!r}?")
        raise ConfigError(
            f"{path}: {no_such_file(path, 'agent file')}; expected a YAML, or one of: {', '.join(shipped_agents())}"
        )
    return path


class _BlockDumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks to keep a saved prompt readable."""


def _block_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _block_text)


SUFFIX = "_without_tools"
"""The suffix of an agent's name once its tools are removed."""

_PROMPT = """\
Answer the question below. You have no tools here: nothing can be looked up, read or run, and no call is answered.
Work in the tagged functions listed here and in nothing else, whatever other format the question asks for.

Functions:
{roles}

Rules:
{rules}
"""
_THOUGHT_PURPOSE = "Reason about what is asked and what you know about it."


def without_tools(spec: AgentSpec) -> AgentSpec:
    """Return ``spec`` with only its thoughts, its answer and a matching prompt. Without tools it stays unchanged.

    The other roles are removed too, because they plan, judge and check the use of tools. The instruction and the
    purpose of thoughts become neutral, because the original ones may mention tools. The answer, its format,
    ``question_format``, ``rules`` and ``limits`` stay, with ``max_turns`` 0.
    """
    if not spec.tool_roles:
        return spec
    neutral = {"purpose": _THOUGHT_PURPOSE, "format": "Plain text."}
    roles = {
        **{tag: spec.roles[tag].model_copy(update=neutral) for tag in spec.thought_roles},
        spec.answer_role: spec.roles[spec.answer_role],
    }
    roles = {tag: roles[tag] for tag in spec.roles if tag in roles}
    data = spec.model_dump(exclude={"roles", "transitions"}) | {
        "name": f"{spec.name}{SUFFIX}",
        "description": f"The agent {spec.name} without its tools.",
        "roles": roles,
        "transitions": {START: (spec.answer_role,)},
        "prompt": _PROMPT,
        "limits": spec.limits.model_copy(update={"max_turns": 0}),
    }
    return AgentSpec.model_validate(data)
