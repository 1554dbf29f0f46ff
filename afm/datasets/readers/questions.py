"""Sets of questions with short answers: one function a layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from afm.datasets.readers.row import (
    Reader,
    abbreviate,
    accepted_answers,
    as_list,
    object_field,
    optional_fields,
    row_id,
    text_field,
)
from afm.datasets.schema import Task
from afm.errors import DataError


def _read_nq(row: Mapping[str, Any], default: str) -> Task:
    """Natural Questions (open): ``{question, answer: [..]}``, as in google-research-datasets/nq_open."""
    gold = accepted_answers(row, "answer", as_list(row.get("answer")))
    return Task(
        id=row_id(row, default, "id"),
        question=text_field(row, "question"),
        ground_truth=gold,
        data_source="nq",
    )


NQ = Reader("nq", "nq", _read_nq)


_HIDDEN = "<unk>"
"""Stands for the answer in the test split."""


def _read_triviaqa(row: Mapping[str, Any], default: str) -> Task:
    """TriviaQA: ``{question, question_id, answer: {value, aliases, ..}}``, as in mandarjoshi/trivia_qa."""
    answer = object_field(row.get("answer"), "answer")
    named = [answer.get("value"), *as_list(answer.get("aliases"))]
    return Task(
        id=row_id(row, default, "question_id"),
        question=text_field(row, "question"),
        ground_truth=accepted_answers(row, "answer", (name for name in named if name != _HIDDEN)),
        data_source="triviaqa",
        extra_info=optional_fields(row, "question_source"),
    )


TRIVIAQA = Reader("triviaqa", "triviaqa", _read_triviaqa)


def _read_hotpotqa(row: Mapping[str, Any], default: str) -> Task:
    """HotpotQA: ``{id, question, answer, type, level, ..}``, as in hotpotqa/hotpot_qa; its test split has no answers."""
    return Task(
        id=row_id(row, default, "id", "_id"),
        question=text_field(row, "question"),
        ground_truth=accepted_answers(row, "answer", [row.get("answer")]),
        data_source="hotpotqa",
        extra_info=optional_fields(row, "type", "level"),
    )


HOTPOTQA = Reader("hotpotqa", "hotpotqa", _read_hotpotqa)


def _read_two_wiki(row: Mapping[str, Any], default: str) -> Task:
    """2WikiMultihopQA: ``{_id or id, type, question, answer, ..}``, as in framolfese/2WikiMultihopQA and the original.

    SimpleDeepSearcher publishes 500 of its questions as ``{id, Question, answer: [..], source}``.
    """
    return Task(
        id=row_id(row, default, "_id", "id"),
        question=text_field(row, "question", "Question"),
        ground_truth=accepted_answers(row, "answer", as_list(row.get("answer"))),
        data_source="2wikimultihopqa",
        extra_info=optional_fields(row, "type"),
    )


TWO_WIKI = Reader("2wikimultihopqa", "2wikimultihopqa", _read_two_wiki)


def _read_musique(row: Mapping[str, Any], default: str) -> Task:
    """MuSiQue: ``{id, question, answer, answer_aliases, answerable, question_decomposition, ..}``, as in dgslibisey/MuSiQue.

    The full variant also holds questions that its paragraphs do not answer; those are refused.
    SimpleDeepSearcher publishes 500 questions as ``{id, Question, answer: [..], source}``.
    """
    if row.get("answerable") is False:
        raise DataError("`answerable` is false: the question has no answer in its paragraphs")
    steps = as_list(row.get("question_decomposition"))
    return Task(
        id=row_id(row, default, "id"),
        question=text_field(row, "question", "Question"),
        ground_truth=accepted_answers(
            row, "answer", [*as_list(row.get("answer")), *as_list(row.get("answer_aliases"))]
        ),
        data_source="musique",
        extra_info={"hops": len(steps)} if steps else {},
    )


MUSIQUE = Reader("musique", "musique", _read_musique)


def _read_bamboogle(row: Mapping[str, Any], default: str) -> Task:
    """Bamboogle: ``{Question, Answer}``, as in chiayewken/bamboogle; ``{id, Question, answer: [..]}`` of SimpleDeepSearcher."""
    key = "answer" if "answer" in row else "Answer"
    return Task(
        id=row_id(row, default, "id"),
        question=text_field(row, "Question"),
        ground_truth=accepted_answers(row, key, as_list(row.get(key))),
        data_source="bamboogle",
    )


BAMBOOGLE = Reader("bamboogle", "bamboogle", _read_bamboogle)


def _read_popqa(row: Mapping[str, Any], default: str) -> Task:
    """PopQA: ``{id, question, possible_answers, prop, s_pop, ..}``, tab-separated, as in akariasai/PopQA.

    ``possible_answers`` is a JSON list in a text.
    """
    return Task(
        id=row_id(row, default, "id"),
        question=text_field(row, "question"),
        ground_truth=accepted_answers(row, "possible_answers", _listed(row.get("possible_answers"))),
        data_source="popqa",
        extra_info=optional_fields(row, "prop"),
    )


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, str):
        return as_list(value)
    try:
        return as_list(json.loads(value))
    except ValueError:
        raise DataError(f"`possible_answers`: expected a JSON list, got {abbreviate(value)}") from None


POPQA = Reader("popqa", "popqa", _read_popqa)


def _read_flashrag(row: Mapping[str, Any], default: str) -> Task:
    """The question sets of FlashRAG and Search-R1: ``{id, question, golden_answers: [..], metadata}``.

    As in RUC-NLPIR/FlashRAG_datasets, where the seven question sets of AFM's evaluation come from one place. The data source
    is given with the command, since rows do not name it, and so is the beginning of the ids: those of the rows (``test_0``) are
    the same in every set.
    """
    gold = accepted_answers(row, "golden_answers", as_list(row.get("golden_answers")))
    source = row.get("data_source")
    return Task(
        id=default,
        question=text_field(row, "question"),
        ground_truth=gold,
        data_source=source if isinstance(source, str) else "",
        extra_info={"published_id": row_id(row, default, "id")},
    )


FLASHRAG = Reader("flashrag", "", _read_flashrag)
