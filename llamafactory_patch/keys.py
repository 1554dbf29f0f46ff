"""The keys a training configuration may have, without the seconds that importing LLaMA-Factory takes.

They are read from the source text of the argument classes; a test holds them against the classes themselves.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from afm.errors import MissingExtraError

_HPARAMS = ("model_args", "data_args", "training_args", "finetuning_args", "generating_args")
_SOURCES = {
    "llamafactory": tuple(f"hparams/{name}.py" for name in _HPARAMS),
    "transformers": ("training_args.py", "training_args_seq2seq.py"),
}


_POSITIVE = frozenset(
    {"cutoff_len", "gradient_accumulation_steps", "lora_rank", "max_samples", "num_train_epochs"}
    | {"per_device_eval_batch_size", "per_device_train_batch_size", "preprocessing_batch_size"}
    | {"preprocessing_num_workers"}
)
_NOT_NEGATIVE = frozenset({"dataloader_num_workers", "learning_rate", "val_size", "weight_decay"})
"""Numbers that the trainer stumbles over late, or takes for something else without a word."""

_OPEN = frozenset({"swanlab_mode"})
"""Texts with more choices than LLaMA-Factory's annotation names: see ``checks.py``."""

_TYPES: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "bool": ("true or false", (bool,)),
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "str": ("a text", (str,)),
    "list": ("a list", (list,)),
    "dict": ("a mapping", (dict,)),
    "None": ("nothing", (type(None),)),
}
"""Types in annotations, what a person calls them, and what YAML makes of them."""


@dataclass(frozen=True, slots=True)
class KeyKind:
    """What a key takes: ``words`` say it in errors, ``choices`` are the only texts, and a switch is no number."""

    words: str
    types: tuple[type, ...]
    choices: tuple[str, ...] = ()
    above: float = -math.inf
    least: float = -math.inf

    def holds(self, value: object) -> bool:
        """Whether LLaMA-Factory can take ``value``; NaN and infinity are rejected."""
        if isinstance(value, bool):
            return bool in self.types
        if not isinstance(value, self.types):
            return False
        if isinstance(value, (int, float)):
            return math.isfinite(value) and value > self.above and value >= self.least
        return not (isinstance(value, str) and self.choices) or value in self.choices


@cache
def engine_keys() -> Mapping[str, KeyKind | None]:
    """Keys that LLaMA-Factory understands, each with its kind if that is a plain one.

    Raises:
        MissingExtraError: LLaMA-Factory or transformers is not installed.
    """
    files = []
    for package, names in _SOURCES.items():
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise MissingExtraError(package, "sft")
        files += [Path(spec.submodule_search_locations[0]) / name for name in names]
    return dict(field for file in files for field in _fields(ast.parse(file.read_text("utf-8"))))


def _fields(tree: ast.Module) -> Iterator[tuple[str, KeyKind | None]]:
    listed = _also_listed(tree)
    for class_def in tree.body:
        if not isinstance(class_def, ast.ClassDef) or not _is_dataclass(class_def):
            continue
        for statement in class_def.body:
            if not isinstance(statement, ast.AnnAssign) or _is_hidden(statement.value):
                continue
            if isinstance(statement.target, ast.Name):
                name = statement.target.id
                yield name, _kind(name, statement.annotation, listed=name in listed)


def _also_listed(tree: ast.Module) -> frozenset[str]:
    """Keys annotated as texts which their class splits at commas, so that a list does as well."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    arguments = (call.args[0] for call in calls if ast.unparse(call.func) == "split_arg")
    return frozenset(key.attr for key in arguments if isinstance(key, ast.Attribute))


def _kind(name: str, annotation: ast.expr, *, listed: bool) -> KeyKind | None:
    """What an annotation allows; ``None`` when it names anything that YAML has no values for."""
    parts = list(_union(annotation))
    choices = tuple(
        value.value
        for part in parts
        if _head(part) == "Literal" and name not in _OPEN
        for value in ast.walk(part)
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    )
    heads = ["str" if _head(part) == "Literal" else _head(part) for part in parts]
    if any(head not in _TYPES for head in heads):
        return None
    heads = list(dict.fromkeys([*heads, "list"] if listed else heads))
    words = [_TYPES[head][0] for head in heads if head != "None"]
    if choices:
        words = [f"one of {', '.join(choices)}"]
    if name in _POSITIVE | _NOT_NEGATIVE:
        words = [f"{word} {'above 0' if name in _POSITIVE else 'of at least 0'}" for word in words]
    return KeyKind(
        " or ".join(words),
        tuple(kind for head in heads for kind in _TYPES[head][1]),
        choices,
        above=0 if name in _POSITIVE else -math.inf,
        least=0 if name in _NOT_NEGATIVE else -math.inf,
    )


def _union(annotation: ast.expr) -> Iterator[ast.expr]:
    if isinstance(annotation, ast.BinOp):
        yield from _union(annotation.left)
        yield from _union(annotation.right)
    elif isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Optional":
        yield from (annotation.slice, ast.Constant(None))
    else:
        yield annotation


def _head(annotation: ast.expr) -> str:
    return ast.unparse(annotation.value if isinstance(annotation, ast.Subscript) else annotation)


def _is_dataclass(class_def: ast.ClassDef) -> bool:
    names = {ast.unparse(decorator).split("(")[0] for decorator in class_def.decorator_list}
    return "dataclass" in names


def _is_hidden(value: ast.expr | None) -> bool:
    """True for ``field(init=False, ...)``, which no configuration can set."""
    return isinstance(value, ast.Call) and any(
        keyword.arg == "init" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        for keyword in value.keywords
    )
