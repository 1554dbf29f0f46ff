"""AFM's RL sets and benchmark files, and raw rows of questions: every layout that :mod:`afm.datasets.schema` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import Reader
from afm.datasets.schema import Task, task_of_row


def _read(row: Mapping[str, Any], default: str) -> Task:
    return task_of_row(row, default_id=default)


AFM_RL = Reader("afm_rl", "", _read)
