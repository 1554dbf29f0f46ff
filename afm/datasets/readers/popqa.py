"""PopQA: ``{id, question, possible_answers, prop, s_pop, ..}``, tab-separated, as in akariasai/PopQA.

``possible_answers`` is a JSON list in a text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader, answers, identity, kept, listed, shown, text
from afm.datasets.schema import Task
from afm.errors import DataError


def _read(row: Mapping[str, Any], default: str) -> Task:
    return Task(
        id=identity(row, default, "id"),
        question=text(row, "question"),
        ground_truth=answers(row, "possible_answers", _listed(row.get("possible_answers"))),
        data_source="popqa",
        extra_info=kept(row, "prop"),
    )


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, str):
        return listed(value)
    try:
        return listed(json.loads(value))
    except ValueError:
        raise DataError(f"`possible_answers`: expected a JSON list, got {shown(value)}") from None


POPQA = Reader("popqa", "popqa", _read)
