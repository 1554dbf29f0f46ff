"""Published rows that a list of sets wants: problems with enough tests, no proofs, a number drawn at random."""

from __future__ import annotations

import hashlib
import heapq
import os
import re
from collections.abc import Iterator
from pathlib import Path

from afm.datasets.published import BadRows, OnRow, ReadCounts, read_published
from afm.datasets.readers.programs import count_tests
from afm.datasets.readers.row import Made
from afm.datasets.schema import Task
from afm.datasets.sources import Preparation
from afm.errors import DataError

_PROOF = re.compile(
    r"\b(?:dis)?prove\s+(?:that|the|this|it|or|each|your|for|if)\b|\bshow\s+that\b|\b(?:give|provide|write)\s+(?:a|the)\s+proof\b"
    r"|\bdemonstrate\s+that\b|证明",
    re.IGNORECASE,
)
_FIND = re.compile(
    r"\b(?:find|determine|compute|calculate|evaluate|express|solve|what|which|how (?:many|much|long|far|old|often))\b|求",
    re.IGNORECASE,
)
_DRAW_BYTES = 8


def read_wanted(
    step: Preparation,
    files: list[Path],
    bad: BadRows,
    counts: ReadCounts,
    *,
    label: str,
    on_row: OnRow | None = None,
) -> Iterator[Made]:
    """Stream what a step makes of files and wants; what it does not want is counted in ``left_out`` with its reason.

    With ``target`` the files are read twice. The draw depends on seed and ids alone, not on the order of rows.

    Raises:
        DataError: As :func:`afm.datasets.published.read_published`.
    """
    rows = _good(step, files, bad, counts, label, on_row)
    if step.target is None:
        yield from rows
        return
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        again = _good(step, files, BadRows(nowhere), ReadCounts(), label, on_row)
        drawn = heapq.nsmallest(
            step.target, ((_draw(step.seed, row.id), row.id) for row in again if isinstance(row, Task))
        )
    chosen = {name for _, name in drawn}
    for row in rows:
        if isinstance(row, Task) and row.id in chosen:
            yield row
        else:
            counts.leave_out("not drawn")


def _good(
    step: Preparation, files: list[Path], bad: BadRows, counts: ReadCounts, label: str, on_row: OnRow | None
) -> Iterator[Made]:
    made = read_published(
        files,
        step.row_reader(),
        bad,
        counts,
        label=label,
        data_source=step.data_source,
        on_row=on_row,
    )
    for row in made:
        if isinstance(row, Task) and (reason := _unwanted(row, step)):
            counts.leave_out(reason)
        else:
            yield row


def _unwanted(task: Task, step: Preparation) -> str:
    if step.no_proofs and asks_for_proof(task.question):
        return "asks for a proof"
    if step.min_tests is None:
        return ""
    try:
        tests = count_tests(task.ground_truth, task.extra_info)
    except DataError:
        return "no tests"
    return f"fewer than {step.min_tests} tests" if tests < step.min_tests else ""


def asks_for_proof(question: str) -> bool:
    """Whether a problem wants something proved and nothing found, by its words (English, Chinese)."""
    return _PROOF.search(question) is not None and _FIND.search(question) is None


def _draw(seed: int, name: str) -> bytes:
    return hashlib.blake2b(
        f"{seed}\0{name}".encode("utf-8", "surrogatepass"), digest_size=_DRAW_BYTES
    ).digest()
