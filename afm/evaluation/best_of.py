"""best-of-k of a finished evaluation: a judge chooses, the outcomes of what it chose are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from afm.errors import ConfigError
from afm.evaluation.judging import (
    CHOICE,
    GRADE,
    GRADES,
    BestOfSettings,
    Candidate,
    JudgedQuestion,
    OnProgress,
    Reply,
    VerdictRequest,
    ask_judge,
    list_messages,
    questions_of,
    read_reply,
    reply_schema,
    score_messages,
    settled,
    shuffled,
)
from afm.evaluation.manifest import MANIFEST_FILE, read_manifest
from afm.evaluation.measures import BestOf, Method, best_of_k
from afm.evaluation.metrics import Metrics
from afm.evaluation.run import finished_metrics, keep_metrics, records_of
from afm.evaluation.statistics import mean_of_shares
from afm.rewards.judge import cache_key
from afm.rewards.judge_endpoint import ReplyClient
from afm.runs.folder import RunFolder

CHOICES_FILE = "choices.jsonl"

_Rows = Mapping[tuple[Any, ...], Mapping[str, Any] | None]
_NO_ANSWER, _SAME = -1.0, 0.0


async def choose(
    output_dir: Path, settings: BestOfSettings, *, on_progress: OnProgress | None = None
) -> Metrics:
    """Add best-of-k to ``metrics.json`` of a finished evaluation.

    Each choice and grade is a line of ``choices.jsonl``, so that a killed or repeated run asks for the rest only; one with
    other settings asks anew. Figures of the same method, k and model are replaced, others stay.

    Raises:
        ConfigError: No judge is configured, no question has enough rounds, or another process is at work in ``output_dir``.
        DataError: ``output_dir`` holds no finished evaluation, or a line of it is broken.
        EngineError: The judge failed too often.
    """
    place = settings.judge.place()
    client = settings.judge.client(place, {})
    try:
        with RunFolder(output_dir, "output_dir").locked():
            metrics = finished_metrics(output_dir)
            questions = questions_of(
                records_of(output_dir), read_manifest(output_dir / MANIFEST_FILE).agents, settings
            )
            _check_rounds(questions, settings, output_dir)
            work = _Work(settings, client, place.model, questions)
            rows = await ask_judge(
                output_dir / CHOICES_FILE,
                list(work.requests()),
                parallel=settings.judge.max_parallel,
                max_failed_share=settings.max_failed_share,
                on_progress=on_progress,
            )
            figures = tuple(work.results(rows))
            again = {(figure.method, figure.k, figure.judge) for figure in figures}
            others = (
                figure for figure in metrics.best_of if (figure.method, figure.k, figure.judge) not in again
            )
            metrics = metrics.model_copy(update={"best_of": (*others, *figures)})
            keep_metrics(output_dir, metrics)
    finally:
        await client.close()
    return metrics


class _Work:
    """What is asked, and what follows from the replies."""

    def __init__(
        self, settings: BestOfSettings, client: ReplyClient, model: str, questions: Sequence[JudgedQuestion]
    ) -> None:
        self._settings = settings
        self._model = model
        self._questions = questions
        fields = settings.judge.request_fields
        self._lists = client.asking(fields(model, reply_schema(CHOICE)))
        self._grades = client.asking(fields(model, reply_schema(GRADE)))

    def requests(self) -> Iterator[VerdictRequest]:
        """All that needs a judge."""
        if Method.LIST in self._settings.methods:
            for k in self._settings.sizes:
                for question in self._questions:
                    for group in question.groups(k):
                        if settled(group) is None:
                            yield self._choice(question, group, k)
        if Method.SCORE in self._settings.methods:
            for question in self._graded_questions():
                yield from (
                    self._grade(question, candidate) for candidate in question.candidates if candidate.answer
                )

    def results(self, rows: _Rows) -> Iterator[BestOf]:
        """The figures, in the order of methods and sizes."""
        for method in self._settings.methods:
            for k in self._settings.sizes:
                yield self._by_list(k, rows) if method is Method.LIST else self._by_score(k, rows)

    def _graded_questions(self) -> Iterator[JudgedQuestion]:
        """Those whose answers differ, with enough episodes for one of the sizes."""
        for question in self._questions:
            if len(question.candidates) >= min(self._settings.sizes) and settled(question.candidates) is None:
                yield question

    def _choice(self, question: JudgedQuestion, group: Sequence[Candidate], k: int) -> VerdictRequest:
        shown = shuffled(group, question.task, self._settings.seed)
        messages = list_messages(question.text, shown)

        def read(text: str) -> dict[str, Any]:
            reply = read_reply(text, messages, CHOICE, range(1, len(shown) + 1))
            row = {
                "method": Method.LIST,
                "k": k,
                "task": question.task,
                "rounds": [candidate.round for candidate in shown],
            }
            return {**row, "choice": shown[reply.number - 1].round, **_why(reply, question)}

        return _request((Method.LIST, k, question.task, group[0].round), self._lists, messages, read)

    def _grade(self, question: JudgedQuestion, candidate: Candidate) -> VerdictRequest:
        messages = score_messages(question.text, candidate)

        def read(text: str) -> dict[str, Any]:
            reply = read_reply(text, messages, GRADE, GRADES)
            row = {
                "method": Method.SCORE,
                "task": question.task,
                "round": candidate.round,
                "grade": reply.number,
            }
            return {**row, **_why(reply, question)}

        return _request((Method.SCORE, question.task, candidate.round), self._grades, messages, read)

    def _by_list(self, k: int, rows: _Rows) -> BestOf:
        shares: list[float] = []
        places: dict[int, int] = {}
        abstained = asked = free = 0
        for question in self._questions:
            outcomes: list[bool | None] = []
            for group in question.groups(k):
                own = settled(group)
                row = rows.get((Method.LIST, k, question.task, group[0].round))
                if own is not None:
                    free += 1
                    outcomes.append(own.passed)
                elif row is None:
                    abstained += 1
                    outcomes.append(None)
                else:
                    asked += 1
                    place = row["rounds"].index(row["choice"]) + 1
                    places[place] = places.get(place, 0) + 1
                    outcomes.append(
                        next(candidate.passed for candidate in group if candidate.round == row["choice"])
                    )
            if outcomes and None not in outcomes:
                shares.append(sum(map(bool, outcomes)) / len(outcomes))
        chosen = {place: count / asked for place, count in sorted(places.items())}
        return self._figures(Method.LIST, k, shares, abstained, asked, free, chosen)

    def _by_score(self, k: int, rows: _Rows) -> BestOf:
        shares: list[float] = []
        abstained = asked = free = 0
        for question in self._questions:
            if len(question.candidates) < k:
                continue
            by_judge = settled(question.candidates) is None
            grades = [
                self._graded(question, candidate, rows, by_judge=by_judge)
                for candidate in question.candidates
            ]
            for candidate, grade in zip(question.candidates, grades, strict=True):
                needed = by_judge and bool(candidate.answer)
                asked += needed and grade is not None
                abstained += needed and grade is None
                free += not needed
            known = [
                (grade, candidate.passed)
                for grade, candidate in zip(grades, question.candidates, strict=True)
                if grade is not None
            ]
            if len(known) == len(grades):
                shares.append(best_of_k(known, k))
        return self._figures(Method.SCORE, k, shares, abstained, asked, free, {})

    def _graded(
        self, question: JudgedQuestion, candidate: Candidate, rows: _Rows, *, by_judge: bool
    ) -> float | None:
        if not candidate.answer:
            return _NO_ANSWER
        if not by_judge:
            return _SAME
        row = rows.get((Method.SCORE, question.task, candidate.round))
        return None if row is None else float(row["grade"])

    def _figures(
        self,
        method: Method,
        k: int,
        shares: Sequence[float],
        abstained: int,
        asked: int,
        free: int,
        places: dict[int, float],
    ) -> BestOf:
        return BestOf(
            method=method,
            k=k,
            judge=self._model,
            share=mean_of_shares(shares, seed=self._settings.seed) if shares else None,
            questions=len(shares),
            abstained=abstained,
            asked=asked,
            settled=free,
            places=places,
        )


def _request(
    name: tuple[Any, ...],
    client: ReplyClient,
    messages: Sequence[Mapping[str, str]],
    read: Callable[[str], dict[str, Any]],
) -> VerdictRequest:
    body = client.body(messages)
    return VerdictRequest(name, cache_key(client.where, body), lambda: client.reply(body, read))


def _why(reply: Reply, question: JudgedQuestion) -> dict[str, str]:
    return {} if question.sealed else {"rationale": reply.rationale}


def _check_rounds(questions: Sequence[JudgedQuestion], settings: BestOfSettings, output_dir: Path) -> None:
    most = max((len(question.candidates) for question in questions), default=0)
    if most < max(settings.sizes):
        raise ConfigError(
            f"best_of.sizes: best-of-{max(settings.sizes)} needs {max(settings.sizes)} scored rounds of a question; "
            f"{output_dir} has at most {most}; evaluate with rounds={max(settings.sizes)}, or choose smaller sizes"
        )
