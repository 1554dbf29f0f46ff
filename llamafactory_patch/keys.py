"""The keys a training configuration may have, without the seconds that importing LLaMA-Factory takes.

They are read from the source text of the argument classes; a test holds them against the classes themselves.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from afm.errors import MissingExtraError

_HPARAMS = ("model_args", "data_args", "training_args", "finetuning_args", "generating_args")
_SOURCES = {
    "llamafactory": tuple(f"hparams/{name}.py" for name in _HPARAMS),
    "transformers": ("training_args.py", "training_args_seq2seq.py"),
}


@cache
def engine_keys() -> frozenset[str]:
    """Keys that LLaMA-Factory with this package's options understands.

    Raises:
        MissingExtraError: LLaMA-Factory or transformers is not installed.
    """
    files = [Path(__file__).with_name("arguments.py")]
    for package, names in _SOURCES.items():
        spec = find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise MissingExtraError(package, "sft")
        files += [Path(spec.submodule_search_locations[0]) / name for name in names]
    return frozenset(field for file in files for field in _fields(ast.parse(file.read_text("utf-8"))))


def _fields(tree: ast.Module) -> Iterator[str]:
    for class_def in tree.body:
        if not isinstance(class_def, ast.ClassDef) or not _is_dataclass(class_def):
            continue
        for statement in class_def.body:
            if not isinstance(statement, ast.AnnAssign) or _is_hidden(statement.value):
                continue
            if isinstance(statement.target, ast.Name):
                yield statement.target.id


def _is_dataclass(class_def: ast.ClassDef) -> bool:
    names = {ast.unparse(decorator).split("(")[0] for decorator in class_def.decorator_list}
    return "dataclass" in names


def _is_hidden(value: ast.expr | None) -> bool:
    """True for ``field(init=False, ...)``, which no configuration can set."""
    return isinstance(value, ast.Call) and any(
        keyword.arg == "init" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        for keyword in value.keywords
    )
