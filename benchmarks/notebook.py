"""Turn docs/python.md into a notebook with the output of its cells.

Usage: python benchmarks/notebook.py          (runs the cells of docs/python.md and writes docs/python.ipynb)
       python benchmarks/notebook.py --run    (runs them in this folder and prints their outputs as JSON)

A ``python`` fence of the page is a cell, unless its title marks it as not run. A ``text`` fence is the output of the cell
before it. Cells run inside a running event loop, as in Jupyter, so the page also tests the synchronous calls there.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, NOTEBOOK = ROOT / "docs/python.md", ROOT / "docs/python.ipynb"
_FENCE = re.compile(r"^(```|~~~)(python|text)\n(.*?)\n\1$", re.MULTILINE | re.DOTALL)


@dataclass
class Cell:
    """A part of the page: text, or code with the output on the page."""

    source: str
    is_code: bool = False
    output: str = ""


def cells(page: str) -> list[Cell]:
    """Return the cells of a page in order."""
    pieces: list[Cell] = []
    position = 0
    for match in _FENCE.finditer(page):
        if text := page[position : match.start()].strip():
            pieces.append(Cell(text))
        if match[2] == "python":
            pieces.append(Cell(match[3], is_code=True))
        else:
            pieces[-1].output = match[3]
        position = match.end()
    rest = page[position:].strip()
    return [*pieces, Cell(rest)] if rest else pieces


async def outputs(sources: list[str]) -> list[str]:
    """Run cells; return what each prints and the ``repr`` of its last expression, as Jupyter shows it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for source in sources:
        tree = ast.parse(source)
        last = tree.body[-1]
        body = tree.body[:-1] if isinstance(last, ast.Expr) else tree.body
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
                print(repr(value) if value is not None else "", end="")
        shown.append(printed.getvalue().rstrip("\n"))
    return shown


def run_page() -> list[str]:
    """Run the page's cells in a separate process and folder; return their outputs."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, "--run"], cwd=folder, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(done.stderr)
    result: list[str] = json.loads(done.stdout.splitlines()[-1])
    return result


def notebook(page: str) -> str:
    """Return the page as a notebook in format 4.5, with the outputs on the page."""
    pieces: list[dict[str, Any]] = []
    for number, cell in enumerate(cells(page)):
        piece: dict[str, Any] = {"id": f"cell-{number}", "metadata": {}, "source": _lines(cell.source)}
        if cell.is_code:
            stream = {"name": "stdout", "output_type": "stream", "text": _lines(cell.output)}
            piece |= {
                "cell_type": "code",
                "execution_count": None,
                "outputs": [stream] if cell.output else [],
            }
        else:
            piece["cell_type"] = "markdown"
        pieces.append(piece)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"cells": pieces, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    code = [cell for cell in cells(PAGE.read_text(encoding="utf-8")) if cell.is_code]
    if sys.argv[1:] == ["--run"]:
        print(json.dumps(asyncio.run(outputs([cell.source for cell in code]))))
    else:
        for cell, output in zip(code, run_page(), strict=True):
            if cell.output != output:
                sys.exit(
                    f"{PAGE}: a cell now shows\n{output}\nthe page says\n{cell.output}\nafter\n{cell.source}"
                )
        NOTEBOOK.write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
