"""Reading configuration: YAML in, validated models out, errors that name file, key and expectation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from afm.errors import ConfigError, suggestion

ModelT = TypeVar("ModelT", bound=BaseModel)


def read_mapping(source: Path | Mapping[str, Any], what: str) -> tuple[str, dict[str, Any]]:
    """The settings in a YAML file or a mapping, and the name that errors call them by.

    Args:
        source: Path of a YAML file, or the settings themselves.
        what: What it configures, e.g. ``tools``.

    Raises:
        ConfigError: The file is missing, is no YAML, or holds no mapping.
    """
    if isinstance(source, Mapping):
        return f"{what} configuration", dict(source)
    path = Path(source)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: the {what} configuration cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: got {type(data).__name__}, expected a mapping of {what} settings")
    return str(path), data


def validated(model: type[ModelT], data: object, label: str, at: str = "") -> ModelT:
    """``data`` as a ``model``.

    Args:
        label: File or name that errors begin with.
        at: Key path of ``data`` within the file, e.g. ``tools[0].config``.

    Raises:
        ConfigError: One line for each fault: file, key path, value got, what was expected.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [f"{label}: {_explained(details, at, model)}" for details in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def _explained(details: ErrorDetails, at: str, model: type[BaseModel]) -> str:
    location = details["loc"]
    path = at
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    if details["type"] == "extra_forbidden":
        known = _fields(model, location[:-1])
        hint = f"; {suggestion(str(location[-1]), known)}" if known else ""
        return f"{path}: unknown key{hint}"
    if details["type"] == "missing":
        return f"{path}: missing, but required"
    expected = details["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    given = repr(details["input"])
    shown = given if len(given) <= 80 else f"{given[:77]}..."
    return f"{path or 'settings'}: got {shown} ({type(details['input']).__name__}), expected {expected}"


def _fields(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Names of the fields at ``location`` inside ``model``; empty when it is no model."""
    current: object = model
    for part in location:
        if isinstance(part, int):
            continue
        field = getattr(current, "model_fields", {}).get(part)
        candidates = [] if field is None else _models(field.annotation)
        current = candidates[0] if candidates else None
    return list(getattr(current, "model_fields", {}))


def _models(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models(part)]
