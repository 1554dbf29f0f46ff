"""DAPO-Math-17k: verl rows whose prompt wraps the problem, as in BytedTsinghua-SIA/DAPO-Math-17k.

The published file repeats its 17 thousand problems a hundred times, with equal ``extra_info.index``: repetitions are
counted and left out by :func:`afm.datasets.published.read_published`. The wrapping (an instruction before the problem and
a reminder behind it) asks for an answer format of its own, which would contradict the agent's, so it is taken away.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader, identity, mapping
from afm.datasets.readers.verl_row import asked, gold_of
from afm.datasets.schema import Task

_BEFORE = "Solve the following math problem step by step."
_BEHIND = 'Remember to put your answer on its own line after "Answer:".'


def _read(row: Mapping[str, Any], default: str) -> Task:
    info = mapping(row.get("extra_info") or {}, "extra_info")
    return Task(
        id=identity(info, default, "index"),
        question=_problem(asked(row)),
        ground_truth=gold_of(row),
        data_source="math_dapo",
    )


def _problem(prompt: str) -> str:
    """The problem alone; a prompt without the wrapping as it is."""
    lead, blank, rest = prompt.partition("\n\n")
    body = rest if blank and lead.startswith(_BEFORE) else prompt
    return body.removesuffix(_BEHIND).strip() or prompt


DAPO_MATH = Reader("dapo_math", "math_dapo", _read)
