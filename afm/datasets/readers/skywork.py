"""Skywork-OR1-RL-Data: mathematics and programs in one layout, told apart by ``ability`` and ``data_source``.

Mathematics has a JSON list of answers, programs an object of tests: ``{inputs, outputs, fn_name}`` (TACO) or
``{entry_point, import_prefix, test_code}`` (LeetCode). The data source becomes the one that chooses our reward
(``skywork_math``, ``skywork_livecodebench_*``); the published one stays in ``extra_info``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.code_row import checked_tests
from afm.datasets.readers.row import Reader, answers, identity, listed, mapping, shown, text
from afm.datasets.readers.verl_row import asked, gold_of
from afm.datasets.schema import Task
from afm.errors import DataError

_SUITES = ("leetcode", "taco")


def _read(row: Mapping[str, Any], default: str) -> Task:
    source = text(row, "data_source")
    info = mapping(row.get("extra_info") or {}, "extra_info")
    extra: dict[str, Any] = {"published_source": source}
    if isinstance(info.get("model_difficulty"), Mapping):
        extra["model_difficulty"] = dict(info["model_difficulty"])
    is_code = "code" in source.split("-") or row.get("ability") == "code"
    gold = gold_of(row)
    return Task(
        id=f"{source}-{identity(info, default, 'index')}",
        question=asked(row),
        ground_truth=_tests(gold) if is_code else _answers(gold, row),
        data_source=_code_source(source) if is_code else "skywork_math",
        extra_info=extra,
    )


def _code_source(source: str) -> str:
    return f"skywork_livecodebench_{next((name for name in _SUITES if name in source), 'other')}"


def _answers(gold: str, row: Mapping[str, Any]) -> list[str]:
    try:
        values = listed(json.loads(gold))
    except ValueError:
        values = [gold]
    return answers(row, "reward_model", (value if isinstance(value, str) else str(value) for value in values))


def _tests(gold: str) -> dict[str, Any]:
    try:
        tests = dict(mapping(json.loads(gold), "reward_model.ground_truth"))
    except ValueError:
        raise DataError(f"`reward_model.ground_truth`: expected JSON with tests, got {shown(gold)}") from None
    if "test_code" in tests:
        tests["test"] = tests.pop("test_code")
    return checked_tests(tests)


SKYWORK = Reader("skywork_or1", "", _read)
