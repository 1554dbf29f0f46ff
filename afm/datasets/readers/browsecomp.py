"""BrowseComp: ``{problem, answer, problem_topic, canary}``, as in smolagents/browse_comp.

Its owner (arXiv 2504.12516) keeps questions and answers out of web pages: they are encrypted with the row's ``canary`` (see
:mod:`afm.trajectory.sealing`). They are decrypted in memory; the task carries its key, so that `afm data prepare` and every
other writer refuses it, and `afm eval` seals its episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader, kept, text
from afm.datasets.schema import Task
from afm.errors import DataError
from afm.trajectory.sealing import SEALING_KEY, decrypt


def _read(row: Mapping[str, Any], default: str) -> Task:
    if not row.get("canary"):
        raise DataError(
            "`canary`: expected the key of an encrypted row, got none; rows that you decrypted yourself are read with "
            "reader=null, and their episodes are written in the clear"
        )
    canary = text(row, "canary")
    return Task(
        id=default,
        question=_clear(text(row, "problem"), canary, "problem"),
        ground_truth=[_clear(text(row, "answer"), canary, "answer")],
        data_source="browsecomp",
        extra_info={SEALING_KEY: canary} | kept(row, "problem_topic"),
    )


def _clear(hidden: str, canary: str, key: str) -> str:
    try:
        return decrypt(hidden, canary)
    except DataError:
        raise DataError(f"`{key}` cannot be read with the row's `canary`") from None


BROWSECOMP = Reader("browsecomp", "browsecomp", _read)
