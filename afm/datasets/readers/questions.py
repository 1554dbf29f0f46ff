"""Readers of questions with short answers: encyclopaedias, the web, mathematics, and rows with your own keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from afm.datasets.readers.row import (
    Row,
    abbreviate,
    accepted_answers,
    as_list,
    gold_answer,
    last_question,
    object_field,
    optional_fields,
    text_field,
)
from afm.datasets.schema import Task, solution_result, task_of_row
from afm.errors import DataError, suggestion
from afm.trajectory.chat import row_id
from afm.trajectory.record import SEALING_KEY, decrypt

_HIDDEN = "<unk>"
"""Placeholder for the answer in TriviaQA's test split."""
_NUMBER_KEYS = ("answer", "Answer", "final_answer")
_DAPO_BEFORE = "Solve the following math problem step by step."
_DAPO_BEHIND = 'Remember to put your answer on its own line after "Answer:".'


def read_nq(row: Row, default: str) -> Task:
    """Read Natural Questions (open): ``{question, answer: [..]}``, as in google-research-datasets/nq_open."""
    return _task_with_answers(row, default, "answer", "id")


def read_triviaqa(row: Row, default: str) -> Task:
    """Read TriviaQA: ``{question, question_id, answer: {value, aliases, ..}}``, as in mandarjoshi/trivia_qa."""
    answer = object_field(row.get("answer"), "answer")
    names = [answer.get("value"), *as_list(answer.get("aliases"))]
    return Task(
        id=row_id(row, "question_id") or default,
        question=text_field(row, "question"),
        ground_truth=accepted_answers(row, "answer", (name for name in names if name != _HIDDEN)),
        extra_info=optional_fields(row, "question_source"),
    )


def read_hotpotqa(row: Row, default: str) -> Task:
    """Read HotpotQA: ``{id, question, answer, type, level, ..}``, as in hotpotqa/hotpot_qa. Its test split has no answers."""
    return _task_with_answers(row, default, "answer", "id", "_id", extra=("type", "level"))


def read_two_wiki(row: Row, default: str) -> Task:
    """Read 2WikiMultihopQA: ``{_id or id, type, question, answer, ..}``, as in framolfese/2WikiMultihopQA and the original.

    SimpleDeepSearcher publishes 500 of its questions as ``{id, Question, answer: [..], source}``.
    """
    return _task_with_answers(row, default, "answer", "_id", "id", extra=("type",))


def read_musique(row: Row, default: str) -> Task:
    """Read MuSiQue, dgslibisey/MuSiQue: ``{id, question, answer, answer_aliases, answerable, question_decomposition, ..}``.

    The full variant also has questions that its paragraphs do not answer. They are refused.
    SimpleDeepSearcher publishes 500 questions as ``{id, Question, answer: [..], source}``.
    """
    if row.get("answerable") is False:
        raise DataError("`answerable` is false: the question has no answer in its paragraphs")
    steps = as_list(row.get("question_decomposition"))
    answers = [*as_list(row.get("answer")), *as_list(row.get("answer_aliases"))]
    return Task(
        id=row_id(row) or default,
        question=text_field(row, "question", "Question"),
        ground_truth=accepted_answers(row, "answer", answers),
        extra_info={"hops": len(steps)} if steps else {},
    )


def read_bamboogle(row: Row, default: str) -> Task:
    """Read Bamboogle: ``{Question, Answer}`` (chiayewken/bamboogle) or SimpleDeepSearcher's ``{id, Question, answer: [..]}``."""
    return _task_with_answers(row, default, "answer" if "answer" in row else "Answer", "id")


def read_popqa(row: Row, default: str) -> Task:
    """Read PopQA: ``{id, question, possible_answers, prop, s_pop, ..}``, tab-separated, as in akariasai/PopQA.

    ``possible_answers`` is a JSON list in a string.
    """
    answers = row.get("possible_answers")
    if isinstance(answers, str):
        try:
            answers = json.loads(answers)
        except ValueError:
            raise DataError(f"`possible_answers`: expected a JSON list, got {abbreviate(answers)}") from None
    return _task_with_answers(
        {**row, "possible_answers": answers}, default, "possible_answers", "id", extra=("prop",)
    )


def read_flashrag(row: Row, default: str) -> Task:
    """Read the question sets of FlashRAG and Search-R1: ``{id, question, golden_answers: [..], metadata}``.

    RUC-NLPIR/FlashRAG_datasets has all seven question sets of AFM's evaluation. The command names the data source, because
    rows do not, and the prefix of the ids, because the rows' ids (``test_0``) are the same in every set.
    """
    source = row.get("data_source")
    task = _task_with_answers(row, default, "golden_answers")
    extra = {"published_id": row_id(row) or default}
    return task.model_copy(
        update={"id": default, "data_source": source if isinstance(source, str) else "", "extra_info": extra}
    )


def _task_with_answers(row: Row, default: str, key: str, *ids: str, extra: tuple[str, ...] = ()) -> Task:
    """Return a task with the accepted answers under ``key`` and its id under the first of ``ids``."""
    return Task(
        id=row_id(row, *ids) or default,
        question=text_field(row, "question", "Question"),
        ground_truth=accepted_answers(row, key, as_list(row.get(key))),
        extra_info=optional_fields(row, *extra),
    )


def read_gaia(row: Row, default: str) -> Task:
    """Read the text part of GAIA: ``{task_id, Question, Level, "Final answer", file_name, ..}``, as in gaia-benchmark/GAIA.

    The AFM repository publishes its 103 questions as ``{id, task_id, question, answer, Level, ..}``. SimpleDeepSearcher
    uses the key ``Question`` and a list of answers. Questions with a file are refused, because AFM evaluates the others.
    """
    if row.get("file_name"):
        raise DataError("`file_name` is set, so the question is about a file")
    key = "answer" if "answer" in row else "Final answer"
    task = _task_with_answers(row, default, key, "task_id")
    if task.ground_truth == ["?"]:
        raise DataError(f"`{key}` is withheld, because the row is from the test split")
    level = row.get("Level")
    return task if level is None else task.model_copy(update={"extra_info": {"level": str(level)}})


def read_webwalker(row: Row, default: str) -> Task:
    """Read WebWalkerQA: ``{question, answer, root_url, info: {domain, Level, lang, type, ..}}``.

    The layout is that of callanwu/WebWalkerQA and of the JSON file of AFM's evaluation.
    """
    info = object_field(row.get("info") or row.get("Info") or {}, "info")
    level = info.get("Level") or info.get("difficulty_level")
    extra = optional_fields(row, "root_url") | optional_fields(info, "domain", "lang", "type")
    return Task(
        id=row_id(row) or default,
        question=text_field(row, "question", "Question"),
        ground_truth=text_field(row, "answer", "Answer"),
        extra_info={"level": str(level)} | extra if level else extra,
    )


def read_hle(row: Row, default: str) -> Task:
    """Read Humanity's Last Exam: ``{id, question, image, answer, answer_type, ..}``, as in cais/hle. Images are refused."""
    if row.get("image"):
        raise DataError("`image` is set, so the question is about an image")
    text_field(row, "answer")
    return _task_with_answers(row, default, "answer", "id", extra=("answer_type", "category"))


def read_browsecomp(row: Row, default: str) -> Task:
    """Read BrowseComp: ``{problem, answer, problem_topic, canary}``, as in smolagents/browse_comp.

    Its owner (arXiv 2504.12516) encrypts questions and answers with the row's ``canary``, to keep them out of web pages
    (see :mod:`afm.trajectory.record`). They are decrypted in memory. The task carries its key, so that `afm data prepare`
    and every other writer refuses it, and `afm eval` seals its episodes.
    """
    if not row.get("canary"):
        raise DataError(
            "`canary`: expected the key of an encrypted row, got none; reader=null reads rows that you decrypted yourself, "
            "and their episodes are written in plain text"
        )
    canary = text_field(row, "canary")

    def clear(key: str) -> str:
        try:
            return decrypt(text_field(row, key), canary)
        except DataError:
            raise DataError(f"`{key}` cannot be read with the row's `canary`") from None

    return Task(
        id=default,
        question=clear("problem"),
        ground_truth=[clear("answer")],
        extra_info={SEALING_KEY: canary} | optional_fields(row, "problem_topic"),
    )


def read_math_problem(row: Row, default: str) -> Task:
    """Read mathematical problems: a problem and its answer under the keys of the benchmarks.

    MATH-500 and AIME 2025 have ``problem`` and ``answer``, AIME 2024 ``Problem`` and ``Answer``, AMC 23 ``question`` and
    ``answer``, and OlympiadBench ``question`` and ``final_answer`` (a list whose parts are joined by commas).
    """
    value = next((row[key] for key in _NUMBER_KEYS if row.get(key) is not None), None)
    parts = [_number(part) for part in as_list(value) if part is not None]
    answer = ", ".join(part for part in parts if part)
    if not answer:
        raise DataError(f"`{_NUMBER_KEYS[0]}`: expected an answer, got {abbreviate(value)}")
    return Task(
        id=row_id(row, "unique_id", "ID", "id") or default,
        question=text_field(row, "problem", "Problem", "question"),
        ground_truth=answer,
        extra_info=optional_fields(row, "subject", "level", "subfield"),
    )


def _number(value: Any) -> str:
    """Return a number as text. A table's 27.0 becomes 27."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def read_dapo_math(row: Row, default: str) -> Task:
    """Read DAPO-Math-17k: verl rows whose prompt wraps the problem, as in BytedTsinghua-SIA/DAPO-Math-17k.

    The published file repeats its 17 thousand problems a hundred times with equal ``extra_info.index``.
    :func:`afm.datasets.published.read_published` counts repetitions and leaves them out. The text around the problem (an
    instruction before it and a reminder after it) is removed, because it asks for another answer format than the agent's.
    """
    info = object_field(row.get("extra_info") or {}, "extra_info")
    prompt = last_question(row)
    lead, blank, rest = prompt.partition("\n\n")
    problem = rest if blank and lead.startswith(_DAPO_BEFORE) else prompt
    return Task(
        id=row_id(info, "index") or default,
        question=problem.removesuffix(_DAPO_BEHIND).strip() or prompt,
        ground_truth=gold_answer(row),
    )


def plain_rows(question_key: str | None = None, answer_key: str | None = None) -> Callable[[Row, str], Task]:
    """Return a reader of rows with two keys (by default ``question`` and ``answer``). ``id`` and ``data_source`` are kept.

    An answer may be a text, a number, a list of accepted texts or an object (``{"target": [..]}``, tests of a
    program). A text of several lines that ends in ``#### 18`` is a worked solution as in GSM8K, and the answer is ``18``.
    """
    question_key, answer_key = question_key or "question", answer_key or "answer"

    def read(row: Row, default: str) -> Task:
        for key in (question_key, answer_key):
            if key not in row:
                keys = ", ".join(sorted(map(str, row))[:8])
                near = suggestion(key, row)
                near += f" (the row has {keys})" if near.startswith("did") else ""
                raise DataError(f"no value under {key!r}; {near}")
        known = {key: row[key] for key in ("id", "data_source") if row.get(key) is not None}
        answer = row[answer_key]
        if not _says_something(answer):
            raise DataError(f"`{answer_key}`: expected an answer, got {abbreviate(answer)}")
        if isinstance(answer, str) and "\n" in answer.strip():
            answer = solution_result(answer) or answer
        question = text_field(row, question_key)
        return task_of_row({**known, "question": question, "answer": answer}, default_id=default)

    return read


def _says_something(answer: Any) -> bool:
    values = [answer]
    for value in values:  # which grows: a list may be nested deeper than Python's stack
        if isinstance(value, list | tuple):
            values.extend(value)
        elif bool(value.strip()) if isinstance(value, str) else value not in (None, {}):
            return True
    return False
