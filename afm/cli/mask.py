"""``afm mask``: show which tokens of a trajectory are trained on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from afm.cli.options import given_agent
from afm.errors import DataError, MissingExtraError, UsageError
from afm.masking import Boundary, MaskedIds, encode_batch

if TYPE_CHECKING:
    from afm.trajectory.rows import TrajectoryRow

_BATCH_ROWS = 256
_PICTURES = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"},
    **{code: f"\\x{code:x}" for code in range(0x7F, 0xA0)},
}
"""What a terminal would obey, as what it shows; a text may hold anything."""


def mask(
    file: Annotated[
        Path,
        typer.Argument(
            help="Trajectory JSONL, or alpaca rows as JSON or JSONL. Examples of other layouts are written by "
            "`afm sft`, to data_examples.txt.",
            exists=True,
            dir_okay=False,
        ),
    ],
    tokenizer: Annotated[Path, typer.Option(help="Folder of a fast Hugging Face tokenizer.")],
    agent: Annotated[
        str | None,
        typer.Option(help="Agent to read as: a shipped name or a YAML. Default: the one each row names."),
    ] = None,
    boundary: Annotated[
        Boundary, typer.Option(help="What happens to a token with text of both authors.")
    ] = Boundary.SPLIT,
    without_loss: Annotated[
        list[str] | None,
        typer.Option(help="A role of the agent that is not trained on; may be given several times."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a row.")] = False,
) -> None:
    """Show for every trajectory in FILE which tokens are trained on; masked text stands in ⟦ ⟧.

    It is the whole response, before a training cuts it. Control characters of a terminal are shown as pictures. Rows whose structure is faulty are reported, and the exit status is 1 if there is any.
    """
    from afm.trajectory.rows import read_rows

    if agent is not None:
        given_agent(agent)
    silent = tuple(without_loss or ())
    loaded = _load_tokenizer(tokenizer)
    show = _print_json if as_json else _print_preview
    faulty = 0
    rows = read_rows(file, agent)
    while batch := list(islice(rows, _BATCH_ROWS)):
        sound, faults = _sorted_out(batch, str(file))
        for fault in faults:
            print(fault, file=sys.stderr)
        faulty += len(faults)
        encoded = encode_batch(loaded, [row.segments for row in sound], boundary, roles_without_loss=silent)
        for row, masked in zip(sound, encoded, strict=True):
            show(loaded, row, masked)
    if faulty:
        raise typer.Exit(1)


def _load_tokenizer(folder: Path) -> Any:
    if not (folder / "tokenizer.json").is_file():
        raise UsageError(f"--tokenizer {folder}: expected a folder that holds tokenizer.json")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingExtraError("transformers", "sft") from None
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def _sorted_out(
    batch: Iterable[TrajectoryRow | DataError], path: str
) -> tuple[list[TrajectoryRow], list[DataError]]:
    """Rows that can be encoded, and what is wrong with these and the others."""
    from afm.trajectory import scan

    rows: list[TrajectoryRow] = []
    faults: list[DataError] = []
    for row in batch:
        if isinstance(row, DataError):
            faults.append(row)
            continue
        rows.append(row)
        text = "".join(segment.text for segment in row.segments)
        faults += [issue.located(path, row.line) for issue in scan(text, row.spec).issues]
    return rows, faults


def _runs(masked: MaskedIds) -> Iterator[tuple[int, list[int]]]:
    for kept, pairs in groupby(zip(masked.mask, masked.ids, strict=True), key=lambda pair: pair[0]):
        yield kept, [token for _, token in pairs]


def _text(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _print_json(tokenizer: Any, row: TrajectoryRow, masked: MaskedIds) -> None:
    trained = [token for kept, ids in _runs(masked) if kept for token in ids]
    hidden = [token for kept, ids in _runs(masked) if not kept for token in ids]
    shown = {
        "id": row.id,
        "tokens": len(masked.ids),
        "trained": len(trained),
        "trained_text": _text(tokenizer, trained),
        "masked_text": _text(tokenizer, hidden),
    }
    print(json.dumps(shown, ensure_ascii=False))


def _print_preview(tokenizer: Any, row: TrajectoryRow, masked: MaskedIds) -> None:
    from rich.console import Console
    from rich.text import Text

    preview = Text(
        f"{row.id.translate(_PICTURES)}: {len(masked.ids)} tokens, {sum(masked.mask)} trained on\n",
        style="bold",
    )
    for kept, ids in _runs(masked):
        text = _text(tokenizer, ids).translate(_PICTURES)
        preview.append(text if kept else f"⟦{text}⟧", style="green" if kept else "dim")
    Console(soft_wrap=True, highlight=False).print(preview, end="\n\n")
