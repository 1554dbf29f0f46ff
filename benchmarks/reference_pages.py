"""Generate documentation from the code: two pages, and tables of YAML keys inside other pages.

Usage: python benchmarks/reference_pages.py FOLDER    (writes commands.md and configs.md there, and the tables to docs/)

A table of keys is between ``<!-- keys: module.Class -->`` and ``<!-- end of keys -->``. A field's docstring is its row.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from afm.cli.options import configs_folder
from afm.configuration import Settings

DOCS = Path(__file__).resolve().parent.parent / "docs"
_TABLE = re.compile(r"<!-- keys: ([\w.]+) -->\n.*?<!-- end of keys -->", re.DOTALL)


def commands_page() -> str:
    """Return the page of all commands with their help, arguments and options."""
    import typer

    from afm.cli.commands import app

    root: Any = typer.main.get_command(app)
    lines = [
        "# Commands",
        "",
        "Exit status: 0 for success, 1 for a failure, 2 for wrong usage. Every command has `--help`.",
        "",
    ]
    for name, command in _leaves(root, "afm"):
        lines += [f"## `{name}`", "", *_described(command), ""]
    return "\n".join(lines)


def configs_page() -> str:
    """Return the page of all YAML files in ``configs`` with their headers."""
    folder = configs_folder()
    lines = [
        "# Configurations",
        "",
        "Each file begins with its purpose, hardware, what to expect and an example.",
        "",
    ]
    for group in sorted({file.parent for file in folder.rglob("*.yaml")}):
        lines += [
            f"## `configs/{group.relative_to(folder).as_posix()}`",
            "",
            "| file | header |",
            "|---|---|",
        ]
        lines += [f"| `{file.name}` | {_header(file)} |" for file in sorted(group.glob("*.yaml"))]
        lines += [""]
    return "\n".join(lines)


def with_key_tables(page: str) -> str:
    """Return a page with updated tables of keys."""
    return _TABLE.sub(
        lambda match: f"<!-- keys: {match[1]} -->\n{key_table(match[1])}\n<!-- end of keys -->", page
    )


def key_table(name: str) -> str:
    """Return the table of a settings class (``module.Class``): default and meaning of each key, inherited keys first.

    Raises:
        ValueError: A key has no docstring.
    """
    module, _, class_name = name.rpartition(".")
    model = getattr(importlib.import_module(module), class_name)
    meanings: dict[str, str] = {}
    for owner in reversed(model.__mro__[: model.__mro__.index(Settings)]):
        meanings |= _field_docstrings(owner)
    if missing := [key for key in model.model_fields if key not in meanings]:
        raise ValueError(f"{name}: no docstring below {', '.join(missing)}")
    rows = (f"| `{key}` | {_default(field)} | {meanings[key]} |" for key, field in model.model_fields.items())
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def _field_docstrings(owner: type) -> dict[str, str]:
    """Return the docstrings of the fields that the class itself declares, as Markdown."""
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body  # type: ignore[attr-defined]
    texts = {}
    for field, after in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            texts[ast.unparse(field.target)] = _markdown(str(after.value.value))
    return texts


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value in (None, "", (), [], {}) or isinstance(value, BaseModel):
        return ""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, tuple):
        text = ", ".join(map(str, value))
    return "`{}`".format(text.replace("\n", "\\n").replace("|", "\\|"))


def _markdown(text: str) -> str:
    """Convert a docstring to one line of Markdown for a table cell."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(text.split())).replace("``", "`")
    text = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)
    return text.replace("|", "\\|")


def _leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    command = getattr(command, "load", lambda: command)()
    inner = getattr(command, "commands", None)
    if not inner:
        yield name, command
        return
    for word, child in inner.items():
        yield from _leaves(child, f"{name} {word}")


def _described(command: Any) -> Iterator[str]:
    for paragraph in (command.help or "").split("\n\n"):
        yield from (_safe(" ".join(paragraph.split())), "")
    rows = [row for option in command.params if option.name != "help" and (row := _row(option))]
    if rows:
        yield from ("| option | meaning |", "|---|---|", *rows)


def _row(parameter: Any) -> str:
    required = " (required)" if parameter.required else ""
    if parameter.param_type_name == "argument":
        name = (parameter.metavar or parameter.name or "").upper()
    else:
        name = ", ".join([*parameter.opts, *parameter.secondary_opts])
    default = parameter.default
    shown = (
        f" [{default}]" if isinstance(default, int | float | str) and not isinstance(default, bool) else ""
    )
    return f"| `{name}`{required} | {_safe(getattr(parameter, 'help', None) or '')}{_safe(shown)} |"


def _header(file: Path) -> str:
    """Return the comment at the top of a file as one line."""
    words = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        words.append(line.lstrip("# "))
    return _safe(" ".join(words))


def _safe(text: str) -> str:
    """Escape text for a table cell."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


if __name__ == "__main__":
    out = Path(sys.argv[1])
    (out / "commands.md").write_text(commands_page(), encoding="utf-8")
    (out / "configs.md").write_text(configs_page(), encoding="utf-8")
    for file in DOCS.glob("*.md"):
        file.write_text(with_key_tables(file.read_text(encoding="utf-8")), encoding="utf-8")
