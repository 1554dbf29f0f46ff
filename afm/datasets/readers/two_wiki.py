"""2WikiMultihopQA: ``{_id or id, type, question, answer, ..}``, as in framolfese/2WikiMultihopQA and the original.

SimpleDeepSearcher publishes 500 of its questions as ``{id, Question, answer: [..], source}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader, answers, identity, kept, listed, text
from afm.datasets.schema import Task


def _read(row: Mapping[str, Any], default: str) -> Task:
    return Task(
        id=identity(row, default, "_id", "id"),
        question=text(row, "question", "Question"),
        ground_truth=answers(row, "answer", listed(row.get("answer"))),
        data_source="2wikimultihopqa",
        extra_info=kept(row, "type"),
    )


TWO_WIKI = Reader("2wikimultihopqa", "2wikimultihopqa", _read)
