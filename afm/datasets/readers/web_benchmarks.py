"""Benchmarks of web agents: GAIA, WebWalkerQA, Humanity's Last Exam, BrowseComp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import (
    Reader,
    accepted_answers,
    as_list,
    object_field,
    optional_fields,
    row_id,
    text_field,
)
from afm.datasets.schema import Task
from afm.errors import DataError
from afm.trajectory.sealing import SEALING_KEY, decrypt


def _read_gaia(row: Mapping[str, Any], default: str) -> Task:
    """GAIA: ``{task_id, Question, Level, "Final answer", file_name, ..}``, as in gaia-benchmark/GAIA; the text part alone.

    The AFM repository publishes its 103 questions as ``{id, task_id, question, answer, Level, ..}``; SimpleDeepSearcher names
    them ``Question`` and holds the answer in a list.

    Questions that come with a file are refused: AFM evaluates the others.
    """
    if row.get("file_name"):
        raise DataError("`file_name` is set: the question is about a file")
    key = "answer" if "answer" in row else "Final answer"
    gold = accepted_answers(row, key, as_list(row.get(key)))
    if gold == ["?"]:
        raise DataError(f"`{key}` is withheld: the row is of the test split")
    level = row.get("Level")
    return Task(
        id=row_id(row, default, "task_id"),
        question=text_field(row, "Question", "question"),
        ground_truth=gold,
        data_source="gaia",
        extra_info={} if level is None else {"level": str(level)},
    )


GAIA = Reader("gaia", "gaia", _read_gaia)


def _read_webwalker(row: Mapping[str, Any], default: str) -> Task:
    """WebWalkerQA: ``{question, answer, root_url, info: {domain, Level, lang, type, ..}}``.

    As in callanwu/WebWalkerQA and in the JSON file of AFM's evaluation.
    """
    info = object_field(row.get("info") or row.get("Info") or {}, "info")
    level = info.get("Level") or info.get("difficulty_level")
    extra = optional_fields(row, "root_url") | optional_fields(info, "domain", "lang", "type")
    return Task(
        id=row_id(row, default, "id"),
        question=text_field(row, "question", "Question"),
        ground_truth=text_field(row, "answer", "Answer"),
        data_source="webwalker",
        extra_info={"level": str(level)} | extra if level else extra,
    )


WEBWALKER = Reader("webwalker", "webwalker", _read_webwalker)


def _read_hle(row: Mapping[str, Any], default: str) -> Task:
    """Humanity's Last Exam: ``{id, question, image, answer, answer_type, ..}``, as in cais/hle; questions with an image are refused."""
    if row.get("image"):
        raise DataError("`image` is set: the question is about an image")
    return Task(
        id=row_id(row, default, "id"),
        question=text_field(row, "question"),
        ground_truth=[text_field(row, "answer")],
        data_source="hle",
        extra_info=optional_fields(row, "answer_type", "category"),
    )


HLE = Reader("hle", "hle", _read_hle)


def _read_browsecomp(row: Mapping[str, Any], default: str) -> Task:
    """BrowseComp: ``{problem, answer, problem_topic, canary}``, as in smolagents/browse_comp.

    Its owner (arXiv 2504.12516) keeps questions and answers out of web pages: they are encrypted with the row's ``canary`` (see
    :mod:`afm.trajectory.sealing`). They are decrypted in memory; the task carries its key, so that `afm data prepare` and every
    other writer refuses it, and `afm eval` seals its episodes.
    """
    if not row.get("canary"):
        raise DataError(
            "`canary`: expected the key of an encrypted row, got none; rows that you decrypted yourself are read with "
            "reader=null, and their episodes are written in the clear"
        )
    canary = text_field(row, "canary")
    return Task(
        id=default,
        question=_clear(text_field(row, "problem"), canary, "problem"),
        ground_truth=[_clear(text_field(row, "answer"), canary, "answer")],
        data_source="browsecomp",
        extra_info={SEALING_KEY: canary} | optional_fields(row, "problem_topic"),
    )


def _clear(hidden: str, canary: str, key: str) -> str:
    try:
        return decrypt(hidden, canary)
    except DataError:
        raise DataError(f"`{key}` cannot be read with the row's `canary`") from None


BROWSECOMP = Reader("browsecomp", "browsecomp", _read_browsecomp)
