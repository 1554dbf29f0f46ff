"""Configuration files: from YAML, ``extends`` and ``key=value`` overrides to validated models.

Every error names the file, the key path, the value found and what was expected.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
from yaml.composer import ComposerError

from afm.errors import (
    ConfigError,
    RepeatedErrors,
    UsageError,
    fault_words,
    json_word,
    no_such_file,
    suggestion,
    utf8_advice,
    yaml_fault,
)
from afm.file_kinds import FILE_KINDS, kind_of
from afm.plugins import check_code_of

ModelT = TypeVar("ModelT", bound=BaseModel)
ItemT = TypeVar("ItemT")

OneOrMany = Annotated[
    tuple[ItemT, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]
"""A list. A single text is a list of one."""

Find = Callable[[str, Path], Path]
"""Finds the file of an ``extends`` key, given the folder of the file with the key."""

Anchor = Callable[[dict[str, Any], Path], None]
"""Rewrites in place the paths in a file that are relative to its folder."""


class Settings(BaseModel):
    """Base of all settings in files: immutable, and an unknown key is an error.

    Describe a field in a docstring below it, where the reference documentation reads it. Pydantic does not read it:
    ``use_attribute_docstrings`` parses the source of every model, which costs each command 50 ms.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    recipe_file: ClassVar[Path | None] = None
    """The YAML, if the loader recorded it in the object. No field: the same settings from two files are equal."""


_MOST_VALUES = 100_000
"""Of a YAML with its aliases written out. The largest file of this project has 1,726."""


def _count_values(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Return the number of values of a node with its aliases written out."""
    if node not in known:
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        inner = [part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,))]
        known[node] = 1 + sum(_count_values(part, known) for part in inner)
    return known[node]


class _Loader(yaml.SafeLoader):
    """A safe loader that reads ``3e-5`` as a number, as YAML 1.2 does. It rejects repeated keys, cycles and alias bombs."""

    def compose_document(self) -> yaml.Node | None:
        """Compose the document. Nine nested anchors can stand for 100 million values."""
        node = super().compose_document()
        if node is not None and _count_values(node, {}) > _MOST_VALUES:
            message = f"its aliases stand for more than {_MOST_VALUES:,} values"
            raise ComposerError(None, None, message, node.start_mark)
        return node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node. ``anchors`` holds a value from its beginning, ``end_mark`` is set at its end."""
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()  # type: ignore[no-untyped-call]
            if (node := self.anchors.get(alias.anchor)) is not None and node.end_mark is None:
                message = f"alias *{alias.anchor} is inside the value that it stands for"
                raise ComposerError(None, None, message, alias.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in seen:
                    twice = f"key {key.value!r} is set twice in one mapping, first in line {seen[key.value]}"
                    raise ConfigError(f"line {line}: {twice}")
                seen[key.value] = line
        return super().construct_mapping(node, deep=deep)


_ROW_SUFFIXES = (".jsonl", ".parquet", ".gz", ".csv")
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z"),
    list("-+.0123456789"),
)


def describe_yaml(path: Path) -> str:
    """Return the kind of a YAML and the command for it, for the error of a command that cannot use it."""
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ConfigError, OSError, ValueError, RecursionError):
        data = None
    kind = kind_of(data) if isinstance(data, dict) else None
    return "this is a YAML" if kind is None else f"this is {kind.name}; {kind.use_of(path)}"


def _refuse_other_kind(path: Path, data: Mapping[str, Any], what: str) -> None:
    """Refuse a file of another kind, with the command for it. A key of only one kind decides the kind."""
    expected = next((kind for kind in FILE_KINDS if what in kind.content), None)
    if expected is None or expected.matches(data) or (kind := kind_of(data)) is None:
        return
    raise ConfigError(f"{path}: this is {kind.name}, expected {expected.name}; {kind.use_of(path)}")


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        ConfigError: A key is set twice in one mapping.
        yaml.YAMLError: The text is not YAML.
    """
    return yaml.load(text, _Loader)


def read_file(path: Path, what: str = "settings") -> dict[str, Any]:
    """Return the mapping in a YAML file. Errors call its content ``what``.

    Raises:
        ConfigError: The file is missing, is not YAML, holds no mapping with words as keys, or is of another kind. Or it
            runs code that needs ``--trust`` (:mod:`afm.plugins`).
    """
    if path.suffix in (*_ROW_SUFFIXES, ".py") and path.is_file():
        holds = "Python code" if path.suffix == ".py" else "rows of data"
        raise ConfigError(f"{path}: holds {holds}, expected a YAML of {what}; see afm list --help")
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: {no_such_file(path)}; expected a YAML of {what}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except UnicodeDecodeError as error:
        wide = error.object.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
        advice = f"save it as UTF-8: {utf8_advice(path, *(['UTF-16'] if wide else []))}"
        if not wide and b"\0" in error.object:
            advice = "give the right file"
        line = error.object.count(b"\n", 0, error.start) + 1
        why = f"byte {error.start + 1} (line {line}) is not UTF-8; expected {what}; {advice}"
        raise ConfigError(f"{path}: cannot be read as YAML: {why}") from None
    except (yaml.YAMLError, OSError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be read as YAML: {yaml_fault(error, path)}; expected {what}"
        ) from None
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        if isinstance(data, dict):
            odd = next(key for key in data if not isinstance(key, str))
            raise ConfigError(f"{path}: got the key {odd!r}, expected words as the keys of {what}")
        got = "nothing" if data is None else json_word(data)
        raise ConfigError(f"{path}: got {got}, expected a mapping of {what}, with lines such as `key: value`")
    _refuse_other_kind(path, data, what)
    check_code_of(path, data)
    return data


def read_mapping(source: str | Path | Mapping[str, Any], what: str) -> tuple[str, dict[str, Any]]:
    """Return the label of settings for errors, and the settings, which may be given as the path of a YAML."""
    if isinstance(source, Mapping):
        return f"{what} configuration", dict(source)
    return str(source), read_file(Path(source), f"{what} settings")


def read_extended(
    path: Path, what: str = "settings", *, find: Find | None = None, anchor: Anchor | None = None
) -> dict[str, Any]:
    """Read a YAML file, merged over the files that it ``extends``, the later over the earlier; see :func:`merged`.

    Args:
        find: Where ``extends`` looks; by default a path relative to the file.
        anchor: Applied to every file before the merge.

    Raises:
        ConfigError: A file cannot be read, or ``extends`` is circular.
    """
    find = find or (lambda name, folder: folder / name)
    return _extended(path, what, find, anchor or (lambda data, folder: None), ())


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``over`` into ``base``. Mappings merge key by key, other values replace, ``null`` removes an inherited key."""
    result = dict(base)
    for key, value in over.items():
        inherited = result.get(key)
        if value is None and key in result:
            del result[key]
        elif isinstance(inherited, dict) and isinstance(value, dict):
            result[key] = merged(inherited, value)
        else:
            result[key] = value
    return result


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set ``key=value`` pairs in place. Keys may be dotted, values are YAML, an empty value is ``null``.

    Raises:
        UsageError: A pair does not have this form, or its key leads through a plain value.
    """
    for override in overrides:
        if override.startswith("--"):
            raise UsageError(f"{_flag(override)}; `--help` lists the options")
        key, (_, equals, text) = override_key(override), override.partition("=")
        if not equals or not key:
            both = ""
            if override.endswith(".yaml"):
                both = f"; to combine YAMLs: one with `extends: [FILE, {override}]`"
            raise UsageError(f"override {override!r}: expected key=value, for example seed=1{both}")
        try:
            value = parse_yaml(text)
        except (yaml.YAMLError, ConfigError) as error:
            problem = getattr(error, "problem", None) or " ".join(str(error).split())
            raise UsageError(f"override {override!r}: the value is not YAML: {problem}") from None
        *parents, last = key.split(".")
        level = data
        for parent in parents:
            inner = level.get(parent)
            if inner is not None and not isinstance(inner, dict):
                raise UsageError(f"override {override!r}: {parent!r} is a value, not a group of settings")
            level[parent] = level = dict(inner or {})
        level[last] = value


def _flag(word: str) -> str:
    """Return what to write instead of an option of another program, such as ``--learning_rate``."""
    name = word.lstrip("-").partition("=")[0]
    if re.search(r"api_key|token|secret", name):
        return f"{word.partition('=')[0]}: secrets are never options; set the environment variable {name.upper()}"
    return f"{word}: not an option; write a setting as key=value, here {name}=VALUE"


def read_in_place(data: dict[str, Any], key: str, overrides: Sequence[str]) -> None:
    """Replace the file name in ``data[key]`` by the file's content, if an override reaches into it.

    Raises:
        ConfigError: The file cannot be read.
    """
    reaches = any(override_key(override).startswith(f"{key}.") for override in overrides)
    if reaches and isinstance(data.get(key), str):
        data[key] = read_file(Path(data[key]), f"{key} settings")


def override_key(override: str) -> str:
    """Return the dotted key of a ``key=value`` pair.

    A key of verl may have Hydra's sign in front: ``+verl.a.b`` is ``verl.a.+b``.

    Raises:
        UsageError: The pair has a sign of Hydra that adds or deletes a key.
    """
    key = override.partition("=")[0]
    if added := re.fullmatch(r"\s*\++(verl\..*?)([^.]+)\s*", key):
        return f"{added[1]}+{added[2].strip()}"
    if (sign := re.match(r"\s*(\++|~)", key)) and sign[1] != "~":
        raise UsageError(
            f"override {override!r}: no sign is needed to add a key; write {override.strip().lstrip('+')}"
        )
    if sign:
        raise UsageError(
            f"override {override!r}: ~ does not delete a key; set it to null: {key.strip()[1:]}=null"
        )
    return key.strip()


def validated(
    model: type[ModelT], data: object, label: str, at: str = "", overrides: Sequence[str] | None = None
) -> ModelT:
    """Validate ``data`` as a ``model``.

    Args:
        label: File or name that errors begin with.
        at: Key path of ``data`` within the file, e.g. ``tools[0].config``.
        overrides: The ``key=value`` pairs that are already in ``data``; errors name the pair that caused them. ``None``
            if the command does not take pairs.

    Raises:
        ConfigError: One line for each fault: file, key path, value got, what was expected. Faults of one kind are counted
            after the third, and the known keys are listed once.
        UsageError: The same, if only overrides are wrong.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = error.errors()
        typed = [_typed(details["loc"], overrides or ()) for details in faults]
        lines: list[str] = []
        repeats = RepeatedErrors()
        for override, details in zip(typed, faults, strict=True):
            place = f"override {override!r}" if override else label
            line = f"{place}: {_explained(details, at, model, overrides is not None)}"
            short, expected, known = line.partition("; expected one of: ")
            kind = f"unknown {details['loc'][:-1]}" if details["type"] == "extra_forbidden" else ""
            if kind and (empty := _empty_before(data, details["loc"])):
                line = f"{short}; `{empty}:` above it is empty: indent this line if it belongs there"
            if repeats.is_new(short, kind):
                listed = kind and any(earlier.endswith(expected + known) for earlier in lines)
                lines.append(short if listed else line)
        lines += repeats.rest()
        raise (UsageError if all(typed) else ConfigError)("\n".join(lines)) from None


def _empty_before(data: Any, location: Sequence[Any]) -> str | None:
    """Return the key before a key at the top if it has no value, as when the lines that belong to it are not indented."""
    keys = list(data) if isinstance(data, dict) and len(location) == 1 else []
    before = dict(pairwise(reversed(keys))).get(location[0])
    return str(before) if before is not None and data[before] is None else None


def _extended(
    path: Path, what: str, find: Find, anchor: Anchor, children: tuple[Path, ...]
) -> dict[str, Any]:
    own = path.resolve()
    if own in children:
        chain = " -> ".join(str(file) for file in (*children, own))
        raise ConfigError(f"{path}: `extends` is circular: {chain}")
    data = read_file(path, what)
    anchor(data, path.parent)
    named = data.pop("extends", None)
    parents = named if isinstance(named, list) else [] if named is None else [named]
    base: dict[str, Any] = {}
    for parent in parents:
        if not isinstance(parent, str):
            raise ConfigError(
                f"{path}: extends: got {parent!r}, expected a name or a path, or a list of them"
            )
        try:
            found = find(parent, path.parent)
            if not found.exists():
                raise ConfigError(
                    f"{found}: {no_such_file(found)}; expected a path from the folder of {path.name}"
                )
        except ConfigError as error:
            raise ConfigError(f"{path}: extends: {error}") from None
        base = merged(base, _extended(found, what, find, anchor, (*children, own)))
    return merged(base, data)


def _typed(location: tuple[int | str, ...], overrides: Sequence[str]) -> str | None:
    """Return the override that set the value at ``location``, or a part of it."""
    for override in reversed(overrides):
        key = override_key(override).split(".")
        if all(str(part) == name for part, name in zip(location, key, strict=False)) and location:
            return override
    return None


def _explained(details: ErrorDetails, at: str, model: type[BaseModel], takes_overrides: bool) -> str:
    location = details["loc"]
    path = at
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    if details["type"] == "extra_forbidden":
        known = _fields(model, location[:-1])
        return f"{path}: unknown key" + (f"; {suggestion(str(location[-1]), known)}" if known else "")
    if details["type"] == "missing":
        return f"{path}: missing, but required" + (f"; give {path}=VALUE" if takes_overrides else "")
    return f"{path}: {fault_words(details)}" if path else fault_words(details)


def _fields(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Return the names of the fields at ``location`` in ``model``; empty if no model is there."""
    current: object = model
    for part in location:
        field = getattr(current, "model_fields", {}).get(part)
        if field is not None:
            current = next(iter(_models(field.annotation)), None)
    return list(getattr(current, "model_fields", {}))


def _models(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models(part)]
