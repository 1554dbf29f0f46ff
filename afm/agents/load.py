"""Agents from YAML: shipped ones by name, your own by path, or one that extends another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import yaml

from afm.agents.spec import AgentSpec
from afm.configuration import read_extended, validated
from afm.errors import ConfigError, suggestion
from afm.runs.atomic import replace_text

_SHIPPED_FOLDER = Path(__file__).parent
MODEL_AGENT_FILE = "agent.yaml"
"""The file in a trained model's folder that declares the agent it was trained as."""
MODEL_AGENTS_DIR = "agents"
"""The folder beside it with ``NAME.yaml`` of each agent, where it was trained as several."""


def shipped_agents() -> tuple[str, ...]:
    """Names of the agents that come with the package, sorted."""
    return tuple(sorted(file.stem for file in _SHIPPED_FOLDER.glob("*.yaml")))


def load_agent(name_or_path: str | Path) -> AgentSpec:
    """Load a shipped agent by name, or a YAML file by path.

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
    return inner if not (folder / "config.json").is_file() and (inner / "config.json").is_file() else folder


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
