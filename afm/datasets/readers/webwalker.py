"""WebWalkerQA: ``{question, answer, root_url, info: {domain, Level, lang, type, ..}}``.

As in callanwu/WebWalkerQA and in the JSON file of AFM's evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader, identity, kept, mapping, text
from afm.datasets.schema import Task


def _read(row: Mapping[str, Any], default: str) -> Task:
    info = mapping(row.get("info") or row.get("Info") or {}, "info")
    level = info.get("Level") or info.get("difficulty_level")
    extra = kept(row, "root_url") | kept(info, "domain", "lang", "type")
    return Task(
        id=identity(row, default, "id"),
        question=text(row, "question", "Question"),
        ground_truth=text(row, "answer", "Answer"),
        data_source="webwalker",
        extra_info={"level": str(level)} | extra if level else extra,
    )


WEBWALKER = Reader("webwalker", "webwalker", _read)
