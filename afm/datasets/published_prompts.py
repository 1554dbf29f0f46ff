"""Prompts that others publish, as constants of a Python file or around the questions of their rows, as texts with ``{question}``.

A Python file is parsed and never executed. This project ships none of these texts: a list in ``configs/data/`` names repository,
commit, file and constant, ``afm data download`` fetches the file, ``afm data prepare published`` writes the text.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from afm.datasets.schema import parquet_rows
from afm.errors import DataError, suggestion
from afm.runs.atomic import replace_text

PROMPTS_FOLDER = "prompts"
"""In the folder of the downloads."""
QUESTION = "{question}"
_PROMPT = "{prompt}"


class PublishedPrompt(BaseModel):
    """One prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9_][\w.-]*$")
    """Of the text file, without its ending."""
    file: str
    """Path in the repository: a Python file, or a parquet file of rows with prompts."""
    constant: str = ""
    """Name of the text at the top of a Python file."""
    form: str = Field(default=f"{_PROMPT}\n\nQuestion: {QUESTION}", pattern=r"\{prompt\}")
    """The user's turn around it: ``{prompt}`` is the text without blanks at its ends, ``{question}`` stays.
    """

    def write(self, sources: Path, folder: Path) -> Path:
        """Take the text out of ``sources/file`` into ``folder/name.txt``; raises what :meth:`text` does.

        A line break follows the text, which whoever reads a prompt takes away (:mod:`afm.agents.prompt_source`).
        """
        path = folder / f"{self.name}.txt"
        replace_text(path, self.text(sources) + "\n")
        return path

    def text(self, sources: Path) -> str:
        """The user's turn, with ``{question}`` exactly once."""
        source = sources / self.file
        if source.suffix == ".parquet":
            text = around_questions(source)
        else:
            text = self.form.replace(_PROMPT, text_constant(source, self.constant).strip())
        if (count := text.count(QUESTION)) != 1:
            raise DataError(
                f"prompt {self.name!r}: {QUESTION} occurs {count} times, expected once; "
                "correct `form` in the list of sets",
                path=str(source),
            )
        return text


def text_constant(file: Path, name: str) -> str:
    """The text that a Python file gives a name at its top level: a literal, or one with ``.strip()`` behind it.

    Raises:
        DataError: The file is missing or no Python, or has no text of that name.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except OSError:
        raise DataError("no such file; `afm data download` fetches it", path=str(file)) from None
    except (SyntaxError, ValueError) as error:
        raise DataError(f"no Python file: {error}", path=str(file)) from None
    texts = {
        target.id: text
        for node in tree.body
        if isinstance(node, ast.Assign) and (text := _literal(node.value)) is not None
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if name not in texts:
        raise DataError(f"no constant {name!r} that is a text; {suggestion(name, texts)}", path=str(file))
    return texts[name]


def around_questions(file: Path) -> str:
    """What the user's turns of all rows of a parquet file begin and end with, ``{question}`` between.

    A word that all questions begin with, and a line that all end with, is the questions'.

    Raises:
        DataError: The file is missing, has fewer than two rows, or a row without a user's turn.
    """
    if not file.is_file():
        raise DataError("no such file; `afm data download` fetches it", path=str(file))
    turns = [_user_turn(row, file, number) for number, row in parquet_rows(file)]
    if len(set(turns)) < 2:
        raise DataError(
            f"{len(set(turns))} different prompts, expected two or more to compare", path=str(file)
        )
    before = re.sub(r"\S+\Z", "", _shared_start(turns))
    after = _shared_start([turn[len(before) :][::-1] for turn in turns])[::-1]
    return before + QUESTION + re.sub(r"\A[^\n]+", "", after)


def _shared_start(texts: list[str]) -> str:
    first, last = min(texts), max(texts)
    differs = (place for place, (mine, other) in enumerate(zip(first, last, strict=False)) if mine != other)
    return first[: next(differs, len(first))]


def _user_turn(row: Any, file: Path, number: int) -> str:
    try:
        return str(next(turn["content"] for turn in reversed(row["prompt"]) if turn["role"] == "user"))
    except (DataError, KeyError, TypeError, StopIteration):
        raise DataError("expected `prompt` with a user's turn", path=str(file), line=number) from None


def _literal(value: ast.expr) -> str | None:
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else None
    match value:
        case ast.Call(func=ast.Attribute(value=inner, attr="strip"), args=[], keywords=[]):
            text = _literal(inner)
            return None if text is None else text.strip()
    return None
