"""Agents from YAML: shipped ones by name, your own by path, or one that extends another."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from afm.agents.spec import AgentSpec, Grade, Limits, RoleSpec
from afm.errors import ConfigError, suggestion

_SHIPPED_FOLDER = Path(__file__).parent
MODEL_AGENT_FILE = "agent.yaml"
"""The file in a trained model's folder that declares the agent it was trained as."""


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
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def model_folder(path: str | Path) -> Path:
    """The folder that holds the model: ``path`` itself, or its ``model`` when ``path`` is a training run."""
    folder = Path(path)
    inner = folder / "model"
    return inner if not (folder / "config.json").is_file() and (inner / "config.json").is_file() else folder


def agent_of_model(model_dir: str | Path, name: str) -> AgentSpec:
    """The spec a model was trained as: its folder's ``agent.yaml`` if that is called ``name``.

    Otherwise the shipped agent ``name`` (or the YAML, when ``name`` is a path).
    """
    own = model_folder(model_dir) / MODEL_AGENT_FILE
    if own.is_file():
        spec = load_agent(own)
        if spec.name == name:
            return spec
    return load_agent(name)


def _load(source: Path) -> AgentSpec:
    data = _resolve(source, ())
    try:
        return AgentSpec.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(source, error, data)) from None


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


def _resolve(source: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    own = source.resolve()
    if own in children:
        chain = " -> ".join(str(path) for path in (*children, own))
        raise ConfigError(f"{source}: `extends` goes in a circle: {chain}")
    data = _read(source)
    parent = data.pop("extends", None)
    if parent is None:
        return data
    if not isinstance(parent, str):
        raise ConfigError(f"{source}: extends: got {parent!r}, expected the name or the path of an agent")
    try:
        base = _find(parent, source.parent)
    except ConfigError as error:
        raise ConfigError(f"{source}: extends: {error}") from None
    return _merged(_resolve(base, (*children, own)), data)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        inherited = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(inherited, dict) and isinstance(value, dict):
            result[key] = _merged(inherited, value)
        else:
            result[key] = value
    return result


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses a mapping with the same key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen and isinstance(key_node, yaml.ScalarNode):
                line = key_node.start_mark.line + 1
                raise ConfigError(f"line {line}: key {key_node.value!r} stands twice in one mapping")
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


class _BlockDumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, so that a saved prompt stays readable."""


def _block_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _block_text)


def _read(source: Path) -> dict[str, Any]:
    try:
        data = yaml.load(source.read_text(encoding="utf-8"), _UniqueKeyLoader)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{source}: cannot be read as YAML: {error}") from None
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{source}: got {type(data).__name__}, expected a mapping of agent settings")
    return data


def _explain(source: Path, error: ValidationError, data: Mapping[str, Any]) -> str:
    lines = [_explain_one(details, data) for details in error.errors()]
    return "\n".join(f"{source}: {line}" for line in lines)


def _explain_one(details: ErrorDetails, data: Mapping[str, Any]) -> str:
    location = details["loc"]
    key = ".".join(str(part) for part in location)
    if details["type"] == "extra_forbidden":
        model = _model_at(location[:-1])
        return f"unknown key {key!r}; {suggestion(str(location[-1]), model.model_fields)}"
    if details["type"] == "missing":
        return f"{key}: missing; give it or extend an agent that has it"
    message = details["msg"].removeprefix("Value error, ")
    if not location:
        return f"agent {data.get('name', '?')!r}: {message}"
    return f"{key}: got {_short(details['input'])}: {message}"


def _model_at(location: tuple[int | str, ...]) -> type[BaseModel]:
    if location[:1] == ("roles",):
        return Grade if location[2:] == ("grade",) else RoleSpec
    return Limits if location == ("limits",) else AgentSpec


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
