"""LiveCodeBench: the rows of livecodebench/code_generation_lite (``test.jsonl``, ``test2.jsonl`` ..).

Public tests are JSON in a text; private ones are packed, and stay so: they are unpacked once here to be checked, and
again by the reward. ``question_id`` goes along, so that complete tests are found by LIVECODEBENCH_DATA_PATH.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.code_row import checked_tests, with_starter_code
from afm.datasets.readers.row import Reader, kept, text
from afm.datasets.schema import Task

_TESTS = ("public_test_cases", "private_test_cases", "metadata")


def _read(row: Mapping[str, Any], default: str) -> Task:
    name = text(row, "question_id")
    tests = checked_tests({**kept(row, *_TESTS), "question_id": name})
    starter = row.get("starter_code") or ""
    return Task(
        id=name,
        question=with_starter_code(text(row, "question_content"), starter),
        ground_truth=tests,
        data_source="livecodebench",
        extra_info={"starter_code": starter}
        | kept(row, "question_title", "platform", "contest_id", "contest_date", "difficulty"),
    )


LIVECODEBENCH = Reader("livecodebench", "livecodebench", _read)
