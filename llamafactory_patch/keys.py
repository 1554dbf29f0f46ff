"""The keys a training configuration may have, without the seconds that importing LLaMA-Factory takes.

They are read from the source text of the argument classes; a test holds them against the classes themselves.
"""

from __future__ import annotations

import ast
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


@dataclass(frozen=True, slots=True)
class Kind:
    """What a key takes, for keys that take a number or a switch.

    Attributes:
        words: For errors.
        types: Python types of the value; a switch is no number here.
    """

    words: str
    types: tuple[type, ...]

    def holds(self, value: object) -> bool:
        """Whether LLaMA-Factory can take ``value``."""
        return isinstance(value, self.types) and (bool in self.types or not isinstance(value, bool))


_KINDS = {
    "bool": Kind("true or false", (bool,)),
    "int": Kind("a whole number", (int,)),
    "float": Kind("a number", (int, float)),
}


@cache
def engine_keys() -> Mapping[str, Kind | None]:
    """Keys that LLaMA-Factory with this package's options understands, each with its kind if that is a plain one.

    Raises:
        MissingExtraError: LLaMA-Factory or transformers is not installed.
    """
    files = [Path(__file__).with_name("arguments.py")]
    for package, names in _SOURCES.items():
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise MissingExtraError(package, "sft")
        files += [Path(spec.submodule_search_locations[0]) / name for name in names]
    return dict(field for file in files for field in _fields(ast.parse(file.read_text("utf-8"))))


def _fields(tree: ast.Module) -> Iterator[tuple[str, Kind | None]]:
    for class_def in tree.body:
        if not isinstance(class_def, ast.ClassDef) or not _is_dataclass(class_def):
            continue
        for statement in class_def.body:
            if not isinstance(statement, ast.AnnAssign) or _is_hidden(statement.value):
                continue
            if isinstance(statement.target, ast.Name):
                yield statement.target.id, _KINDS.get(ast.unparse(statement.annotation))


def _is_dataclass(class_def: ast.ClassDef) -> bool:
    names = {ast.unparse(decorator).split("(")[0] for decorator in class_def.decorator_list}
    return "dataclass" in names


def _is_hidden(value: ast.expr | None) -> bool:
    """True for ``field(init=False, ...)``, which no configuration can set."""
    return isinstance(value, ast.Call) and any(
        keyword.arg == "init" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        for keyword in value.keywords
    )
