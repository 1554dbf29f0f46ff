"""The question sets of FlashRAG and Search-R1: ``{id, question, golden_answers: [..], metadata}``.

As in RUC-NLPIR/FlashRAG_datasets, where the seven question sets of AFM's evaluation come from one place. The data source
is given with the command, since rows do not name it, and so is the beginning of the ids: those of the rows (``test_0``) are
the same in every set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader, answers, identity, listed, text
from afm.datasets.schema import Task


def _read(row: Mapping[str, Any], default: str) -> Task:
    gold = answers(row, "golden_answers", listed(row.get("golden_answers")))
    source = row.get("data_source")
    return Task(
        id=default,
        question=text(row, "question"),
        ground_truth=gold,
        data_source=source if isinstance(source, str) else "",
        extra_info={"published_id": identity(row, default, "id")},
    )


FLASHRAG = Reader("flashrag", "", _read)
