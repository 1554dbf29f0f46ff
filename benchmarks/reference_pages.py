"""Pages of the documentation that are made from the code: ``python benchmarks/reference_pages.py FOLDER``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from afm.cli.options import configs_folder


def commands_page() -> str:
    """Every command with its help, arguments and options."""
    import typer

    from afm.cli.main import app

    root = typer.main.get_command(app)
    lines = ["# Commands", "", "Exit status: 0 done, 1 failed, 2 typed wrongly. Each has `--help`.", ""]
    for name, command in _leaves(root, "afm"):
        lines += [f"## `{name}`", "", *_described(command), ""]
    return "\n".join(lines)


def configs_page() -> str:
    """Every YAML in ``configs`` with its header."""
    folder = configs_folder()
    lines = [
        "# Configurations",
        "",
        "Each file begins with its purpose, hardware, what to expect and an example.",
        "",
    ]
    for group in sorted({file.parent for file in folder.rglob("*.yaml")}):
        lines += [f"## `configs/{group.relative_to(folder).as_posix()}`", "", "| file | |", "|---|---|"]
        lines += [f"| `{file.name}` | {_header(file)} |" for file in sorted(group.glob("*.yaml"))]
        lines += [""]
    return "\n".join(lines)


def _leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if not inner:
        yield name, command
        return
    for word, one in inner.items():
        yield from _leaves(one, f"{name} {word}")


def _described(command: Any) -> Iterator[str]:
    for paragraph in (command.help or "").split("\n\n"):
        yield from (_safe(" ".join(paragraph.split())), "")
    rows = [row for one in command.params if one.name != "help" and (row := _row(one))]
    if rows:
        yield from ("| option | |", "|---|---|", *rows)


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
    """The comment at the top of a file, in one line."""
    words = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        words.append(line.lstrip("# "))
    return _safe(" ".join(words))


def _safe(text: str) -> str:
    """Text for a table cell."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


if __name__ == "__main__":
    out = Path(sys.argv[1])
    (out / "commands.md").write_text(commands_page(), encoding="utf-8")
    (out / "configs.md").write_text(configs_page(), encoding="utf-8")
