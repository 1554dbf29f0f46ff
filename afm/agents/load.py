"""Agents from YAML: shipped ones by name, your own by path, or one that extends another."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import yaml

from afm.agents.spec import START, AgentSpec
from afm.configuration import read_extended, validated
from afm.errors import ConfigError, suggestion
from afm.runs.atomic import replace_text

_SHIPPED_FOLDER = Path(__file__).parent
MODEL_AGENT_FILE = "agent.yaml"
"""The file in a trained model's folder that declares the agent it was trained as."""
MODEL_AGENTS_DIR = "agents"
"""The folder next to it with a ``NAME.yaml`` per agent, if it was trained as several."""
_ADAPTER_FILE = "adapter_config.json"
"""What peft writes next to an adapter."""


def shipped_agents() -> tuple[str, ...]:
    """Names of the agents that come with the package, sorted."""
    return tuple(sorted(file.stem for file in _SHIPPED_FOLDER.glob("*.yaml")))


def load_agent(name_or_path: str | Path) -> AgentSpec:
    """Load a shipped agent by name, a YAML file by path, or from a model's folder the agent it was trained as.

    A YAML may say ``extends: NAME_OR_PATH`` (paths relative to the file itself). Mappings are merged
    key by key, lists and values replace, and ``null`` removes what was inherited.

    Raises:
        ConfigError: No such agent, bad YAML, an unknown key, or a declaration that contradicts itself.
    """
    source = _find(name_or_path, Path())
    return _shipped(source) if source.parent == _SHIPPED_FOLDER else _load(source)


def save_agent(spec: AgentSpec, path: Path) -> None:
    """Write ``spec`` as a YAML that :func:`load_agent` reads back equal; replaces ``path`` atomically."""
    text = yaml.dump(spec.dump(), Dumper=_BlockDumper, sort_keys=False, allow_unicode=True, width=100)
    replace_text(path, text)


def save_agents(specs: Sequence[AgentSpec], folder: Path) -> None:
    """Write what a model was trained as: ``agent.yaml`` is the first, and of several each is ``agents/NAME.yaml``."""
    save_agent(specs[0], folder / MODEL_AGENT_FILE)
    if len(specs) > 1:
        for spec in specs:
            save_agent(spec, folder / MODEL_AGENTS_DIR / f"{spec.name}.yaml")


def saved_agents(folder: Path) -> list[AgentSpec]:
    """What :func:`save_agents` wrote, the first one first; none where there is no ``agent.yaml``.

    Raises:
        ConfigError: A file is no declaration.
    """
    first = folder / MODEL_AGENT_FILE
    if not first.is_file():
        return []
    specs = [load_agent(file) for file in (first, *sorted((folder / MODEL_AGENTS_DIR).glob("*.yaml")))]
    return list({spec.name: spec for spec in reversed(specs)}.values())[::-1]


def model_folder(path: str | Path) -> Path:
    """The folder that holds the model: ``path`` itself, or its ``model`` when ``path`` is a training run."""
    folder = Path(path)
    inner = folder / "model"
    return inner if not holds_model(folder) and holds_model(inner) else folder


def holds_model(folder: Path) -> bool:
    """Whether a folder is that of a model, or of a LoRA adapter."""
    return (folder / "config.json").is_file() or (folder / _ADAPTER_FILE).is_file()


def adapter_base(folder: Path) -> str | None:
    """The model that the LoRA adapter in ``folder`` belongs to, a folder or a name; ``None`` for a model's folder.

    Raises:
        ConfigError: The adapter does not name one.
    """
    file = folder / _ADAPTER_FILE
    if not file.is_file():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError):
        base = None
    if not base or not isinstance(base, str):
        raise ConfigError(f"{file}: does not name the model of the adapter (base_model_name_or_path)")
    return base


def agent_of_model(model_dir: str | Path, name: str) -> AgentSpec:
    """The spec a model was trained as: of its folder's ``agent.yaml`` and ``agents/*.yaml`` the one called ``name``.

    Otherwise the shipped agent ``name`` (or the YAML, when ``name`` is a path).
    """
    saved = saved_agents(model_folder(model_dir))
    return next((spec for spec in saved if spec.name == name), None) or load_agent(name)


def _load(source: Path) -> AgentSpec:
    return validated(AgentSpec, read_extended(source, "agent settings", find=_find), str(source))


_shipped = lru_cache(maxsize=None)(_load)
"""Rows name their agent one by one; what comes with the package does not change meanwhile."""


def _find(name_or_path: str | Path, base: Path) -> Path:
    name = str(name_or_path)
    if re.fullmatch(r"[a-z][a-z0-9_]*", name) and not isinstance(name_or_path, Path):
        if name in shipped_agents():
            return _SHIPPED_FOLDER / f"{name}.yaml"
        raise ConfigError(
            f"agent {name!r} is not shipped ({suggestion(name, shipped_agents())}); or give the path of a YAML"
        )
    path = base / Path(name_or_path).expanduser()
    if (trained := model_folder(path) / MODEL_AGENT_FILE).is_file():
        return trained
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such agent file; expected a YAML, or one of: {', '.join(shipped_agents())}"
        )
    return path


class _BlockDumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, so that a saved prompt stays readable."""


def _block_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _block_text)


SUFFIX = "_without_tools"
"""What the name of an agent gets when its tools are taken away."""

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
    """``spec`` with its thoughts and its answer alone, and a prompt to match. An agent without tools is unchanged.

    Other functions go with the tools, since they plan, judge and check the use of tools. The thoughts' purpose and
    the instruction are neutral, because an agent's own may speak of its tools. The answer, its format, how the
    question is put and further rules stay, and so do the limits, with no call at all.
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
